import { getEventListeners } from "node:events";
import { Client, ClientClosedError, DeadlineError, Generation, InvalidFieldError, PromptTooLongError } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import { ScriptedDaemon } from "./scripted-daemon.js";

let daemon: ScriptedDaemon;
let client: Client;

beforeAll(async () => {
  daemon = await ScriptedDaemon.start();
  client = new Client(daemon.address);
});
afterAll(async () => {
  client.close();
  await daemon.stop();
});

test("a generation has the tokens, the text, what weights sampled them and why it ended", async () => {
  const generation = await client.generate("hello", { maxTokens: 3, requestId: "one" });
  expect(generation.tokenIds).toEqual([0, 1, 2]);
  expect(generation.text).toBe("<0><1><2>");
  expect(generation.requestId).toBe("one");
  expect(generation.usage).toEqual({ numPromptTokens: 2, numCachedTokens: 0, numOutputTokens: 3 });
  expect(generation.prompt?.numTokens).toBe(2);
  const [sequence] = generation.sequences;
  expect(sequence?.finish).toMatchObject({ reason: "length", numTokens: 3, stopString: undefined });
  expect(sequence?.weightSpans).toEqual([{ version: 0, start: 0, end: 3, loraVersion: 0 }]);
});

test("a stream yields strict deltas, whose sum is the generation", async () => {
  const sum = new Generation();
  const ids: string[] = [];
  for await (const delta of client.stream("hello", { maxTokens: 5, requestId: "two" })) {
    ids.push(delta.requestId);
    sum.add(delta);
  }
  expect(new Set(ids)).toEqual(new Set(["two"]));
  expect(sum.tokenIds).toEqual([0, 1, 2, 3, 4]);
  expect(sum.sequences[0]?.weightSpans).toEqual([{ version: 0, start: 0, end: 5, loraVersion: 0 }]);
});

test("token ids and chats are prompts as well", async () => {
  expect((await client.generate([1, 2, 3], { maxTokens: 2 })).tokenIds).toEqual([0, 1]);
  expect((await client.generate([{ role: "user", content: "hi" }], { maxTokens: 1 })).tokenIds).toEqual([0]);
});

test("leaving the loop ends the request in the daemon", async () => {
  for await (const delta of client.stream("forever", { requestId: "left" })) {
    if (delta.tokenIds.includes(3)) break;
  }
  await daemon.untilClosed("left");
});

test("aborting the signal ends the request in the daemon, and throws the reason", async () => {
  const controller = new AbortController();
  const reason = new Error("enough");
  const reading = (async () => {
    for await (const delta of client.stream("forever", { requestId: "aborted", signal: controller.signal })) {
      if (delta.tokenIds.includes(3)) controller.abort(reason);
    }
  })();
  await expect(reading).rejects.toBe(reason);
  await daemon.untilClosed("aborted");
});

test("a signal that is aborted already lets no call begin", async () => {
  const signal = AbortSignal.abort();
  await expect(client.generate("hello", { signal })).rejects.toMatchObject({ name: "AbortError" });
  await expect(client.generateMany(["hello"], { signal })).rejects.toMatchObject({ name: "AbortError" });
  await expect(client.status({ signal })).rejects.toMatchObject({ name: "AbortError" });
});

test("a call that takes longer than its timeout throws DeadlineError", async () => {
  await expect(client.generate("forever", { timeoutMs: 100 })).rejects.toBeInstanceOf(DeadlineError);
});

test("many prompts are answered in their order, and an error is that of its own request", async () => {
  const generations = await client.generateMany(["a", "refuse PROMPT_TOO_LONG", [1, 2], "d"], { maxTokens: 2 });
  expect(generations.map(({ tokenIds }) => tokenIds)).toEqual([[0, 1], [], [0, 1], [0, 1]]);
  expect(generations.map(({ error }) => error?.constructor)).toEqual([
    undefined,
    PromptTooLongError,
    undefined,
    undefined,
  ]);
  expect(await client.generateMany([])).toEqual([]);
});

test("one of many prompts may have options of its own, which come before those of all", async () => {
  const own = [{ prompt: "a", maxTokens: 3, requestId: "own" }, "b", { prompt: [1], maxTokens: undefined }];
  const generations = await client.generateMany(own, { maxTokens: 2 });
  expect(generations.map(({ tokenIds }) => tokenIds.length)).toEqual([3, 2, 2]);
  expect(generations[0]?.requestId).toBe("own");
  const twice = client.generateMany([
    { prompt: "a", requestId: "same" },
    { prompt: "b", requestId: "same" },
  ]);
  await expect(twice).rejects.toThrow("requestId: is that of two requests");
  await expect(client.generateMany([{ prompt: "a", timeoutMs: 1 } as object as { prompt: string }])).rejects.toThrow(
    "timeoutMs: is an option of all requests together",
  );
});

test("leaving the loop over many prompts ends those that still run", async () => {
  const completed = client.generateAsCompleted(["forever", "b"], { maxTokens: 1 });
  for await (const { index, generation } of completed) {
    expect(index).toBe(1);
    expect(generation.tokenIds).toEqual([0]);
    break;
  }
  await daemon.untilAllClosed();
});

test("many prompts end when their signal is aborted", async () => {
  const signal = AbortSignal.timeout(100);
  await expect(client.generateMany(["forever", "silent"], { signal })).rejects.toMatchObject({ name: "TimeoutError" });
});

test("aborting the signal ends a call that waits for an answer, too", async () => {
  for (const call of [
    (signal: AbortSignal) => client.generate("silent", { signal }),
    (signal: AbortSignal) => client.generateMany(["silent"], { signal }),
  ]) {
    const controller = new AbortController();
    const aborted = expect(call(controller.signal)).rejects.toMatchObject({ name: "AbortError" });
    await daemon.untilOpen();
    controller.abort();
    await aborted;
    await daemon.untilAllClosed();
  }
});

test("a signal is that of as many calls as a program likes, without a warning of Node", async () => {
  const warnings: string[] = [];
  const listen = ({ message }: Error) => warnings.push(message);
  process.on("warning", listen);
  const { signal } = new AbortController();
  const calling = Array.from({ length: 20 }, () => [client.status({ signal }), client.generate("hello", { signal })]);
  await Promise.all(calling.flat());
  await new Promise(setImmediate); // where Node warns
  process.off("warning", listen);
  expect(warnings).toEqual([]);
  expect(getEventListeners(signal, "abort")).toEqual([]);
});

test("requests are ended by their ids, and ids that do not run are told", async () => {
  const stream = client.stream("forever", { requestId: "named" });
  await stream.next();
  expect(await client.abort(["named", "other"])).toEqual({ abortedIds: ["named"], unknownIds: ["other"] });
  await stream.return();
});

test("text becomes tokens and tokens become text", async () => {
  const ids = await client.tokenize("hi");
  expect(ids).toEqual([0, 104, 105]);
  expect(await client.tokenize("hi", { addSpecialTokens: false })).toEqual([104, 105]);
  expect(await client.detokenize(ids, { skipSpecialTokens: true })).toBe("hi");
});

test.each([
  [{ maxTokens: 1.5 }, "maxTokens"],
  [{ maxTokens: 2 ** 31 }, "maxTokens"],
  [{ temperature: "hot" }, "temperature"],
  [{ stop: [1] }, "stop"],
  [{ seed: 2 ** 60 }, "seed"],
  [{ seed: 2n ** 63n }, "seed"],
  [{ max_tokens: 3 }, "max_tokens"],
  [{ regex: "a", choice: ["b"] }, "constraint"],
  [{ timeBudgetMs: NaN }, "timeBudgetMs"],
  [{ addGenerationPrompt: true }, "chat.addGenerationPrompt"],
])("the option %o is refused by its name, before anything is sent", (options, field) => {
  let error: unknown;
  try {
    client.stream("hello", options as object);
  } catch (thrown) {
    error = thrown;
  }
  expect(error).toBeInstanceOf(InvalidFieldError);
  expect((error as InvalidFieldError).violations[0]?.field).toBe(field);
});

test("calls of a client that is closed throw ClientClosedError, those that run included", async () => {
  const closing = new Client(daemon.address);
  const running = closing.generate("forever");
  await closing.status();
  closing.close();
  await expect(running).rejects.toBeInstanceOf(ClientClosedError);
  await expect(closing.status()).rejects.toBeInstanceOf(ClientClosedError);
});
