/** What programs in JavaScript can give, whose types nobody has checked. No call leaves the client. */

import { Client, InvalidFieldError } from "genserve";
import { afterAll, expect, test } from "vitest";

/** The client without its types; a call that begins would be an UnavailableError. */
const client = new Client("127.0.0.1:1") as unknown as Record<string, (...args: unknown[]) => Promise<unknown>> &
  Client;
afterAll(() => {
  client.close();
});

const work = () => undefined;
const chat = [{ role: "user", content: "hi" }];
const wrong: [call: string, args: unknown[], problem: string][] = [
  // Options with typing errors.
  ["generate", ["hi", { maxToken: 1 }], "maxToken: is not an option"],
  ["tokenize", ["hi", { addSpecialToken: false }], "addSpecialToken: is not an option"],
  ["detokenize", [[1], { skipSpecial: true }], "skipSpecial: is not an option"],
  ["abort", [["a"], { every: true }], "every: is not an option"],
  ["status", [{ timeoutMS: 5 }], "timeoutMS: is not an option"],
  ["serverInfo", [{ timeout: 5 }], "timeout: is not an option"],
  ["waitReady", [{ timeout: 5 }], "timeout: is not an option"],
  ["pause", [{ tllMs: 5 }], "tllMs: is not an option"],
  ["paused", [work, { ttl: 5 }], "ttl: is not an option"],
  ["renewPause", ["a", { ttl: 5 }], "ttl: is not an option"],
  ["resume", ["a", { forced: true }], "forced: is not an option"],
  ["resetCache", [{ running: true }], "running: is not an option"],
  ["sleep", [{ tag: ["weights"] }], "tag: is not an option"],
  ["wakeUp", [{ tag: ["weights"] }], "tag: is not an option"],
  ["drain", [{ drainTimeoutS: 60 }], "drainTimeoutS: is not an option"],
  ["getPush", ["a", { id: 1 }], "id: is not an option"],
  ["commitPush", ["a", { force: true }], "force: is not an option"],
  ["discardPush", ["a", { forced: true }], "forced: is not an option"],
  ["getWeights", [{ digests: true }], "digests: is not an option"],
  ["pullWeights", [{ versoin: 1 }], "versoin: is not an option"],
  ["loadLora", ["a", "/b", { path: "/c" }], "path: is not an option"],
  ["unloadLora", ["a", { id: 1 }], "id: is not an option"],
  ["listLoras", [{ id: 1 }], "id: is not an option"],
  // What would be taken for true, or for a list of letters.
  ["resume", ["a", { force: "no" }], "force: must be a boolean"],
  ["abort", [[], { all: "no" }], "all: must be a boolean"],
  ["abort", ["request-1"], "requestIds: must be a list"],
  ["wakeUp", [{ tags: "weights" }], "tags: must be a list"],
  ["discardPush", ["a", { force: 1 }], "force: must be a boolean"],
  ["pushTensors", [{}, { version: 1, force: "no" }], "force: must be a boolean"],
  ["generateMany", [{ prompt: "hi" }], "prompts: must be a list of prompts"],
  ["generateMany", [5], "prompts: must be a list of prompts"],
  ["generateMany", [[null]], "prompt: must be text, token ids or messages"],
  // What no field holds.
  ["detokenize", [[1.5]], "tokenIds: 1.5 is not of type uint32"],
  ["detokenize", ["123"], "tokenIds: must be a list"],
  ["tokenize", [undefined], "prompt: must be text"],
  ["tokenize", [[1, 2]], "prompt: must be text or messages"],
  ["tokenize", ["hi", { addGenerationPrompt: false }], "chat.addGenerationPrompt: the prompt is not a chat"],
  ["generate", [[chat[0], null]], "chat.messages[1]: must be an object"],
  ["generate", [[{ role: "user" }]], "chat.messages[0]: must have a role and a content"],
  ["generate", [[{ ...chat[0], name: "me" }]], "chat.messages[0].name: is not an option"],
  ["generate", [chat, { templateParams: { big: 1n } }], "templateParams: must be JSON"],
  ["generate", ["hi", { engineParams: { at: new Date() } }], "engineParams: must be JSON"],
  ["generate", ["hi", { engineParams: "{}" }], "engineParams: must be an object"],
  ["generate", ["hi", { jsonSchema: { big: 1n } }], "jsonSchema: Do not know how to serialize a BigInt"],
  ["generate", ["hi", { temperature: 1e300 }], "temperature: 1e+300 is not of type float"],
  ["generate", ["hi", { logitBias: { abc: 1 } }], "logitBias: NaN is not of type int32"],
  ["generate", ["hi", { logitBias: { 5: "1" } }], 'logitBias: "1" is not of type float'],
  ["generate", ["hi", { cacheSalt: 5 }], "cacheSalt: must be a string"],
  ["status", [{ signal: {} }], "signal: must be an AbortSignal"],
  ["status", [null], "options: must be an object"],
  ["drain", [60_000], "options: must be an object"],
  ["drain", [{ drainTimeoutMs: NaN }], "drainTimeoutMs: NaN is not a number of milliseconds"],
  ["pause", [{ holder: 5 }], "holder: must be a string"],
  ["paused", ["work"], "work: must be a function"],
  ["resume", [undefined], "leaseId: undefined is not a string"],
  ["getPush", [5], "pushId: 5 is not a string"],
  ["loadLora", [5, "/b"], "loraName: 5 is not a string"],
  ["pushTensors", [{}, { version: 1, onProgress: 5 }], "onProgress: must be a function"],
];

test.each(wrong)("%s is refused before it is sent", async (call, args, problem) => {
  const calling = Promise.resolve().then(() => client[call]?.(...args));
  await expect(calling).rejects.toBeInstanceOf(InvalidFieldError);
  await expect(calling).rejects.toThrow(problem);
});

test("values that are undefined are options that are not given", async () => {
  const nested = { deep: [{ a: 1, b: null, c: undefined }] };
  const given = { maxTokens: undefined, signal: undefined, engineParams: nested, logitBias: { 5: -1 } };
  await expect(client.generate("hi", given)).rejects.toMatchObject({ reason: "UNAVAILABLE" });
  await expect(client.resume("a", { force: undefined })).rejects.toMatchObject({ reason: "UNAVAILABLE" });
});
