/** A real daemon, one for all tests, in their order: each weight version is newer than the one before. */

import { execFile } from "node:child_process";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { Client, DeadlineError, PauseLeaseLostError, PromptTooLongError, type ServedWeights } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import { Clock } from "../clock.js";
import { TinyDaemon } from "./tiny-daemon.js";

const CHUNK_BYTES = 16 << 10;
const PACKAGE = fileURLToPath(new URL("../..", import.meta.url));

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

// The examples come first: what they print has the versions of a daemon that has just started.

/** Runs a program beside the package against the daemon, and says what it prints. */
async function run(program: string, ...args: string[]): Promise<string> {
  const env = { ...process.env, GENSERVE_TARGET: daemon.address };
  const command = ["--import", "tsx", program, ...args];
  return (await promisify(execFile)(process.execPath, command, { cwd: PACKAGE, env })).stdout;
}

test("the example of a stream prints the answer and its number of tokens", async () => {
  expect(await run("examples/stream.ts", "Once")).toMatch(/\(\d+ tokens\)/);
});

test("the example of rollouts prints four samples of each question", async () => {
  expect((await run("examples/rollouts.ts")).match(/tokens, log p -\d+\.\d+, by version \{0: \d+\}/g)).toHaveLength(12);
});

test("the example of a push serves the checkpoint as the next version", async () => {
  expect(await run("examples/push.ts", daemon.shards)).toMatch(/bytes sent in \d+ ms\nserving version 1/);
});

test("the program of the README runs as it stands, but for its address and its checkpoint", async () => {
  const [, program = ""] = /```ts\n(.*?)```/s.exec(await readFile(join(PACKAGE, "README.md"), "utf8")) ?? [];
  const places = { "127.0.0.1:50051": daemon.address, "path/to/checkpoint": daemon.file };
  let own = program;
  for (const [place, other] of Object.entries(places)) {
    expect(own).toContain(place);
    own = own.replace(place, other);
  }
  await mkdir(join(PACKAGE, "build"), { recursive: true });
  const directory = await mkdtemp(join(PACKAGE, "build", "readme-")); // here, so that it finds the package
  const told =
    "\nconsole.log(`${tokenIds.length} tokens, ${text.length > 0}`, (await client.getWeights()).weightVersion);";
  try {
    await writeFile(join(directory, "program.mts"), own + told);
    expect(await run(join(directory, "program.mts"))).toMatch(/64 tokens, true 2\n$/);
  } finally {
    await rm(directory, { recursive: true });
  }
});

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
  await client.pushTensors(await changedNorm(), { version: 3, partial: true });
  const before = await liveDigests();
  const expected = await daemon.pushedByPython(4);
  expect(expected).not.toEqual(before);
  await client.pushTensors(await changedNorm(), { version: 5, partial: true });
  expect(await liveDigests()).not.toEqual(expected);
  const result = await client.pushCheckpoint(daemon.file, { version: 6 });
  expect(result.applied).toMatchObject({ previousVersion: 5, activeVersion: 6 });
  expect(await liveDigests()).toEqual(expected);
  await client.pushTensors(await changedNorm(), { version: 7, partial: true });
  await client.pushCheckpoint(daemon.shards, { version: 8 });
  expect(await liveDigests()).toEqual(expected);
  const { sequences } = await client.generate("Once", { maxTokens: 2 });
  expect(sequences[0]?.weightSpans[0]?.version).toBe(8);
});

test("a push that is cut is resumed, and leaves the same weights", async () => {
  const expected = await liveDigests();
  await client.pushTensors(await changedNorm(), { version: 9, partial: true });
  await daemon.throttle(512 << 10);
  using throughProxy = new Client(daemon.proxy);
  let resumes = 0;
  let isCut = false;
  await throughProxy.pushCheckpoint(daemon.file, {
    version: 10,
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

test("the engine stays paused while its lease is renewed, and runs again", async () => {
  const ttlMs = 60_000;
  using clock = new Clock();
  await client.paused(
    async ({ leaseId, signal }) => {
      const expiry = async () => {
        const { phase, pauses } = (await client.status()).state;
        expect(phase).toBe("paused");
        return pauses.find((each) => each.leaseId === leaseId)?.expireTime?.getTime() ?? 0;
      };
      const first = await expiry();
      await clock.advance(ttlMs / 3);
      while ((await expiry()) <= first) await clock.advance(100);
      expect(signal.aborted).toBe(false);
    },
    { ttlMs, holder: "typescript" },
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
