import { Client, DeadlineError, PauseLeaseLostError, PromptTooLongError, type ServedWeights } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import { TinyDaemon } from "./tiny-daemon.js";

const CHUNK_BYTES = 16 << 10;

let daemon: TinyDaemon;
let client: Client;

beforeAll(async () => {
  daemon = await TinyDaemon.start();
  client = new Client(daemon.address);
}, 240_000);
afterAll(async () => {
  client.close();
  await daemon.stop();
});

function digestsOf({ digests }: ServedWeights): Record<string, string> {
  return Object.fromEntries(digests.map(({ rank, name, sha256 }) => [`${rank} ${name}`, sha256]));
}

async function liveDigests(): Promise<Record<string, string>> {
  return digestsOf(await client.getWeights({ includeDigests: true }));
}

test("greedy generation is what the stream yields, with log-probabilities for each token", async () => {
  const options = { maxTokens: 12, temperature: 0, ignoreEos: true, logprobs: 2 };
  const { sequences, text, tokenIds } = await client.generate("Once upon a time", options);
  expect(tokenIds).toHaveLength(12);
  expect(sequences[0]?.logprobs?.sampled).toHaveLength(12);
  expect(sequences[0]?.finish?.reason).toBe("length");
  const streamed: number[] = [];
  let streamedText = "";
  for await (const delta of client.stream("Once upon a time", options)) {
    streamed.push(...delta.tokenIds);
    streamedText += delta.text;
  }
  expect(streamed).toEqual(tokenIds);
  expect(streamedText).toBe(text);
});

test("several sequences, stop strings and seeds do what they say", async () => {
  const options = { maxTokens: 8, seed: 7n, n: 3, temperature: 1, ignoreEos: true };
  const one = await client.generate([5, 6, 7], options);
  const other = await client.generate([5, 6, 7], options);
  expect(one.sequences).toHaveLength(3);
  expect(one.sequences.map(({ tokenIds }) => tokenIds)).toEqual(other.sequences.map(({ tokenIds }) => tokenIds));
});

test("aborting a stream ends the request in the engine", async () => {
  const controller = new AbortController();
  const reading = (async () => {
    const options = { maxTokens: 2000, ignoreEos: true, signal: controller.signal };
    for await (const { tokenIds } of client.stream("Once", options)) if (tokenIds.length > 0) controller.abort();
  })();
  await expect(reading).rejects.toMatchObject({ name: "AbortError" });
  for await (const { state } of client.watch({ intervalMs: 100, timeoutMs: 30_000 })) {
    if (state.runningRequests === 0) break;
  }
});

test("a deadline ends a generation", async () => {
  const generating = client.generate("Once", { maxTokens: 2000, ignoreEos: true, timeoutMs: 200 });
  await expect(generating).rejects.toBeInstanceOf(DeadlineError);
});

test("64 prompts are answered over one call, with the error of one inside", async () => {
  const prompts: (string | number[])[] = Array.from({ length: 63 }, (_, number) => `Chapter ${number}.`);
  prompts.splice(10, 0, new Array<number>(5000).fill(3));
  const generations = await client.generateMany(prompts, { maxTokens: 8, ignoreEos: true, temperature: 0 });
  expect(generations).toHaveLength(64);
  for (const [index, { error, tokenIds }] of generations.entries()) {
    if (index === 10) expect(error).toBeInstanceOf(PromptTooLongError);
    else expect(tokenIds).toHaveLength(8);
  }
  const alone = await client.generate("Chapter 0.", { maxTokens: 8, ignoreEos: true, temperature: 0 });
  expect(generations[0]?.tokenIds).toEqual(alone.tokenIds);
});

test("a checkpoint leaves the live weights that the same push of the Python client leaves", async () => {
  const before = await liveDigests();
  const expected = await daemon.pushedByPython(1);
  expect(expected).not.toEqual(before);
  await client.pushTensors(await changedNorm(), { version: 2, partial: true });
  expect(await liveDigests()).not.toEqual(expected);
  const result = await client.pushCheckpoint(daemon.file, { version: 3 });
  expect(result.applied).toMatchObject({ previousVersion: 2, activeVersion: 3 });
  expect(await liveDigests()).toEqual(expected);
  await client.pushTensors(await changedNorm(), { version: 4, partial: true });
  await client.pushCheckpoint(daemon.shards, { version: 5 });
  expect(await liveDigests()).toEqual(expected);
  const { sequences } = await client.generate("Once", { maxTokens: 2 });
  expect(sequences[0]?.weightSpans[0]?.version).toBe(5);
});

test("a push that is cut is resumed, and leaves the same weights", async () => {
  const expected = await liveDigests();
  await client.pushTensors(await changedNorm(), { version: 6, partial: true });
  await daemon.throttle(512 << 10);
  using throughProxy = new Client(daemon.proxy);
  let resumes = 0;
  let isCut = false;
  await throughProxy.pushCheckpoint(daemon.file, {
    version: 7,
    chunkBytes: CHUNK_BYTES,
    onProgress: ({ sentBytes, totalBytes, numResumes }) => {
      resumes = numResumes;
      if (isCut || sentBytes < totalBytes / 2) return;
      isCut = true;
      void daemon.reset();
    },
  });
  await daemon.throttle(0);
  expect(isCut).toBe(true);
  expect(resumes).toBeGreaterThan(0);
  expect(await liveDigests()).toEqual(expected);
});

test("a pause outlasts its time to live, and the engine runs again", async () => {
  await client.paused(
    async ({ signal }) => {
      await new Promise((resolve) => setTimeout(resolve, 2500)); // twice the time to live
      expect(signal.aborted).toBe(false);
      expect((await client.status()).state.phase).toBe("paused");
    },
    { ttlMs: 1200, holder: "typescript" },
  );
  expect((await client.generate("Once", { maxTokens: 1 })).tokenIds).toHaveLength(1);
});

test("a lease that nobody renews expires, and its holder is told", async () => {
  const { lease } = await client.pause({ ttlMs: 300 });
  for await (const { state } of client.watch({ timeoutMs: 30_000 })) if (state.phase === "running") break;
  expect((await client.resume(lease.leaseId)).leaseExpired).toBe(true);
  await expect(client.renewPause(lease.leaseId)).rejects.toBeInstanceOf(PauseLeaseLostError);
});

/** One tensor of the model with other values. */
async function changedNorm() {
  const { tensors } = await client.getWeights();
  const norm = tensors.find(({ name }) => name === "model.norm.weight");
  if (norm === undefined) throw new Error("the model has no norm");
  const [size = 0] = norm.shape;
  return { [norm.name]: { dtype: "F32" as const, shape: norm.shape, data: new Float32Array(size).fill(0.5) } };
}
