import { Server, type sendUnaryData, type ServerDuplexStream, type ServerUnaryCall } from "@grpc/grpc-js";
import { Client, Generation, InvalidFieldError, type ManyItem, PromptTooLongError, StreamOverError } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import {
  type AbortRequest,
  AbortResponse,
  FinishReason,
  type GenerateManyRequest,
  GenerateManyResponse,
  GenerateResponse,
  GenerationServiceService,
} from "../src/wire/genserve/v1/generation.js";
import { listening, serve } from "./raw-server.js";
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

test("a stream of many yields deltas of all its requests, and an error of one as an item", async () => {
  using many = client.streamMany();
  const sums = new Map([[await many.submit("a", { maxTokens: 3, requestId: "named" }), new Generation()]]);
  sums.set(await many.submit([1, 2], { maxTokens: 2 }), new Generation());
  const refused = await many.submit("refuse PROMPT_TOO_LONG");
  many.done();
  const last: ManyItem[] = [];
  for await (const item of many) {
    if (item.delta !== undefined) sums.get(item.requestId)?.add(item.delta);
    if (item.isLast) last.push(item);
  }
  expect([...sums.values()].map(({ tokenIds }) => tokenIds)).toEqual([
    [0, 1, 2],
    [0, 1],
  ]);
  expect(sums.get("named")?.text).toBe("<0><1><2>");
  expect(last).toHaveLength(3);
  expect(last.find(({ requestId }) => requestId === refused)?.error).toBeInstanceOf(PromptTooLongError);
});

/** Answers requests named "forever" with one token, and ends them when they are aborted; others end at once. */
class AbortingServer implements AsyncDisposable {
  readonly #server = new Server();
  readonly #running = new Map<string, () => void>();

  async start(): Promise<string> {
    const generateMany = (call: ServerDuplexStream<GenerateManyRequest, GenerateManyResponse>) => {
      const answer = (requestId: string, value: Parameters<typeof GenerateResponse.fromPartial>[0]) => {
        const result = { $case: "response" as const, value: GenerateResponse.fromPartial({ requestId, ...value }) };
        call.write(GenerateManyResponse.fromPartial({ items: [{ requestId, result }] }));
      };
      const endIfIdle = () => {
        if (this.#running.size === 0 && isHalfClosed) call.end();
      };
      let isHalfClosed = false;
      call.on("data", ({ action }: GenerateManyRequest) => {
        if (action?.$case === "abort") this.#running.get(action.value)?.();
        if (action?.$case !== "generate") return;
        const { requestId } = action.value;
        const end = (reason: FinishReason) => () => {
          this.#running.delete(requestId);
          answer(requestId, { outputs: [{ finish: { reason, numTokens: 1 } }], usage: { numOutputTokens: 1 } });
          endIfIdle();
        };
        if (requestId !== "forever") {
          end(FinishReason.LENGTH)();
          return;
        }
        this.#running.set(requestId, end(FinishReason.ABORTED));
        answer(requestId, { outputs: [{ tokenIds: [7] }] });
      });
      call.on("end", () => {
        isHalfClosed = true;
        endIfIdle();
      });
    };
    const abort = (call: ServerUnaryCall<AbortRequest, AbortResponse>, answer: sendUnaryData<AbortResponse>) => {
      for (const requestId of call.request.requestIds) this.#running.get(requestId)?.();
      answer(null, AbortResponse.fromPartial({ abortedIds: call.request.requestIds }));
    };
    serve(this.#server, GenerationServiceService, { generateMany, abort });
    return listening(this.#server);
  }

  [Symbol.asyncDispose](): Promise<void> {
    this.#server.forceShutdown();
    return Promise.resolve();
  }
}

test("requests are submitted while others run, and one is aborted alone", async () => {
  await using server = new AbortingServer();
  using client = new Client(await server.start());
  using many = client.streamMany({ timeoutMs: 20_000 });
  await many.submit("a", { requestId: "forever" });
  const seen: string[] = [];
  for await (const { requestId, delta, isLast } of many) {
    seen.push(`${requestId} ${delta?.outputs[0]?.finish?.reason ?? "goes on"}`);
    if (requestId === "forever" && !isLast) await many.submit("b", { requestId: "second" });
    if (requestId !== "second") continue;
    await many.abort("never submitted");
    await many.abort("forever");
    many.done();
  }
  expect(seen).toEqual(["forever goes on", "second length", "forever aborted"]);
});

test("a request is aborted after done, too", async () => {
  await using server = new AbortingServer();
  using client = new Client(await server.start());
  using many = client.streamMany({ timeoutMs: 20_000 });
  await many.submit("a", { requestId: "forever" });
  many.done();
  await expect(many.submit("more")).rejects.toBeInstanceOf(StreamOverError);
  const reasons: unknown[] = [];
  for await (const { delta, isLast } of many) {
    reasons.push(delta?.outputs[0]?.finish?.reason);
    if (!isLast) await many.abort("forever");
  }
  expect(reasons).toEqual([undefined, "aborted"]);
});

test("leaving the loop ends the requests, and so does the end of the block", async () => {
  {
    using many = client.streamMany();
    await many.submit("forever");
    for await (const _ of many) break;
    await expect(many.submit("more")).rejects.toBeInstanceOf(StreamOverError);
    await daemon.untilAllClosed();
  }
  {
    using many = client.streamMany();
    await many.submit("forever");
    await daemon.untilOpen();
  }
  await daemon.untilAllClosed();
});

test("a mistake in a request is thrown by submit, and the stream goes on", async () => {
  using many = client.streamMany();
  await expect(many.submit("a", { maxTokens: 1.5 })).rejects.toBeInstanceOf(InvalidFieldError);
  await expect(many.submit("a", { timeoutMs: 1 } as object)).rejects.toThrow("timeoutMs: is an option of the stream");
  const requestId = await many.submit("forever", { requestId: "twice" });
  await expect(many.submit("a", { requestId })).rejects.toThrow('requestId: "twice" is running in this stream already');
  await many.submit("a", { maxTokens: 1, requestId: "after" });
  const ended: string[] = [];
  for await (const item of many) {
    if (!item.isLast) continue;
    ended.push(item.requestId);
    many.cancel(); // which ends the loop
  }
  expect(ended).toEqual(["after"]);
});

test("what ends the stream is thrown by the loop and by submit, also if it ended before the loop began", async () => {
  const aborting = new AbortController();
  const reason = new Error("enough");
  using many = client.streamMany({ signal: aborting.signal });
  await many.submit("forever");
  aborting.abort(reason);
  await daemon.untilAllClosed();
  await expect(many.submit("more")).rejects.toBe(reason);
  await expect(many[Symbol.asyncIterator]().next()).rejects.toBe(reason);

  using late = client.streamMany({ timeoutMs: 50 });
  await late.submit("silent");
  await expect(late[Symbol.asyncIterator]().next()).rejects.toMatchObject({ reason: "DEADLINE_EXCEEDED" });

  using nobody = new Client("127.0.0.1:1");
  using unanswered = nobody.streamMany({ timeoutMs: 20_000 });
  await expect(unanswered[Symbol.asyncIterator]().next()).rejects.toMatchObject({ reason: "UNAVAILABLE" });
  await expect(unanswered.submit("a")).rejects.toMatchObject({ reason: "UNAVAILABLE" });
});
