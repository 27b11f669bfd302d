/** Answers that no daemon gives, or that are lost on their way. */

import {
  Server,
  type sendUnaryData,
  type ServerDuplexStream,
  type ServerReadableStream,
  type ServerUnaryCall,
  type ServerWritableStream,
  status,
  type UntypedServiceImplementation,
} from "@grpc/grpc-js";
import { Client, UnavailableError } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import {
  type GenerateManyRequest,
  GenerateManyResponse,
  type GenerateRequest,
  GenerateResponse,
  GenerationServiceService,
} from "../src/wire/genserve/v1/generation.js";
import {
  type GetPushRequest,
  GetPushResponse,
  type PullWeightsRequest,
  PullWeightsResponse,
  type PushWeightsRequest,
  type PushWeightsResponse,
  WeightServiceService,
} from "../src/wire/genserve/v1/weights.js";
import { Clock } from "./clock.js";
import { listening, serve } from "./raw-server.js";

type Frame = NonNullable<Parameters<typeof PullWeightsResponse.fromPartial>[0]["frame"]>;

const server = new Server();
let client: Client;
let responses: GenerateResponse[] = [];
let frames: Frame[] = [];
let missing = { start: 0n, end: 0n };
let nextMissing = missing; // after the next GetPush
let attempt = "";
let numPushStreams = 0;
let pushStreamMs = 0;

beforeAll(async () => {
  const calls: UntypedServiceImplementation = {
    generate: (call: ServerWritableStream<GenerateRequest, GenerateResponse>) => {
      for (const response of responses) call.write(response);
      call.end();
    },
    generateMany: (call: ServerDuplexStream<GenerateManyRequest, GenerateManyResponse>) => {
      call.on("data", ({ action }: GenerateManyRequest) => {
        const requestId = action?.$case === "generate" ? action.value.requestId : "";
        const value = GenerateResponse.fromPartial({ requestId, usage: { numOutputTokens: 1 } });
        call.write(GenerateManyResponse.fromPartial({ items: [{ requestId, result: { $case: "response", value } }] }));
      });
      call.on("end", () => call.emit("error", { code: status.UNAVAILABLE, details: "Connection dropped" }));
    },
  };
  const pullWeights = (call: ServerWritableStream<PullWeightsRequest, PullWeightsResponse>) => {
    for (const frame of frames) call.write(PullWeightsResponse.fromPartial({ frame }));
    call.end();
  };
  const pushWeights = (call: ServerReadableStream<PushWeightsRequest, PushWeightsResponse>) => {
    call.on("data", ({ frame }: PushWeightsRequest) => {
      if (frame?.$case !== "header") return;
      attempt = frame.value.attempt;
      numPushStreams++;
      const broken = () => call.emit("error", { code: status.UNAVAILABLE, details: "Connection dropped" });
      if (pushStreamMs === 0) broken();
      else setTimeout(broken, pushStreamMs);
    });
  };
  const getPush = (_: ServerUnaryCall<GetPushRequest, GetPushResponse>, answer: sendUnaryData<GetPushResponse>) => {
    answer(null, GetPushResponse.fromPartial({ push: { attempt, missing: [missing] } }));
    [missing, nextMissing] = [nextMissing, missing];
  };
  serve(server, GenerationServiceService, calls);
  serve(server, WeightServiceService, { pullWeights, pushWeights, getPush });
  client = new Client(await listening(server));
});
afterAll(() => {
  client.close();
  server.forceShutdown();
});

/** The header of a pull of tensors of one byte for each letter. */
function header(names: string, shape = [1n]): Frame {
  const tensors = Array.from(names, (name, place) => ({ name, dtype: "U8", shape, offset: BigInt(place), length: 1n }));
  const manifest = { tensors, totalBytes: BigInt(names.length) };
  return { $case: "header", value: { weightVersion: 1, attempt: "a", manifest } };
}

test("a generation that ends without its last message is an error", async () => {
  responses = [GenerateResponse.fromPartial({ requestId: "a", outputs: [{ tokenIds: [1] }] })];
  await expect(client.generate("a")).rejects.toThrow("the daemon ended the stream before the request");
});

test("a sequence that no request can have is an error, and takes no memory", async () => {
  responses = [GenerateResponse.fromPartial({ outputs: [{ index: 2 ** 32 - 1 }] })];
  await expect(client.generate("a")).rejects.toThrow("the daemon answered with sequence 4294967295");
});

test("a connection that breaks after the last of many answers loses none", async () => {
  const generations = await client.generateMany(["a", "b"]);
  expect(generations.map(({ usage }) => usage?.numOutputTokens)).toEqual([1, 1]);
});

const bytes: Frame = { $case: "chunk", value: { data: Buffer.from([1, 2]) } };
const end: Frame = { $case: "end", value: {} };

test.each([
  ["ends without all bytes", [header("abc"), bytes, end], "the daemon ended a pull after 2 of 3 bytes"],
  ["ends before it begins", [end], "the daemon ended a pull after 0 of 0 bytes"],
  ["has a name twice", [header("aa"), bytes, end], "the daemon sent two tensors of one name"],
  ["has a shape of other bytes", [header("a", [2n]), bytes, end], "a has 1 bytes, which are not U8 of shape [2]"],
])("a pull that %s is an error, and no weights", async (_, answer, problem) => {
  frames = answer;
  await expect(client.pullWeights()).rejects.toThrow(problem);
  frames = [header("ab"), bytes, end];
  expect((await client.pullWeights()).tensors["b"]?.data).toEqual(Uint8Array.of(2));
});

test.each([
  [2n, 5n],
  [3n, 2n],
])("a push of 4 bytes that misses those from %d to %d is an error", async (start, end) => {
  missing = nextMissing = { start, end };
  const tensors = { a: { dtype: "U8" as const, shape: [4], data: new Uint8Array(4) } };
  await expect(client.pushTensors(tensors, { version: 1 })).rejects.toThrow(
    `the daemon misses bytes ${start} to ${end} of a push of 4`,
  );
});

test("a push that breaks again and again without progress is given up after half a minute", async () => {
  missing = nextMissing = { start: 0n, end: 4n };
  numPushStreams = 0;
  await client.getWeights({ timeoutMs: 1 }).catch(() => undefined); // the connection
  using clock = new Clock();
  const tensors = { a: { dtype: "U8" as const, shape: [4], data: new Uint8Array(4) } };
  let problem: unknown;
  client.pushTensors(tensors, { version: 1, timeoutMs: Infinity }).catch((error: unknown) => (problem = error));
  const beganAt = Date.now();
  while (problem === undefined) await clock.advance(100);
  expect(Date.now() - beganAt).toBeGreaterThan(25_000);
  expect(Date.now() - beganAt).toBeLessThan(35_000);
  expect(problem).toBeInstanceOf(UnavailableError);
  expect((problem as Error).message).toMatch(/^waited \d+ s to resume push "[\w-]+": /);
  expect(numPushStreams).toBeGreaterThan(6);
  expect(numPushStreams).toBeLessThan(30); // with pauses between them
});

test("a push whose streams break after a minute each, without progress, is given up after five resumes", async () => {
  missing = nextMissing = { start: 0n, end: 4n };
  numPushStreams = 0;
  pushStreamMs = 60_000;
  await client.getWeights({ timeoutMs: 1 }).catch(() => undefined); // the connection
  using clock = new Clock();
  const tensors = { a: { dtype: "U8" as const, shape: [4], data: new Uint8Array(4) } };
  let problem: unknown;
  client.pushTensors(tensors, { version: 1, timeoutMs: Infinity }).catch((error: unknown) => (problem = error));
  while (problem === undefined && numPushStreams < 10) await clock.advance(10_000);
  expect(problem).toBeInstanceOf(UnavailableError);
  expect(numPushStreams).toBe(1 + 5);
});

test("a push whose bytes a daemon loses again and again is given up: to bring them again is no progress", async () => {
  missing = { start: 2n, end: 4n };
  nextMissing = { start: 0n, end: 4n }; // as one that dies of the version, and is started again
  numPushStreams = pushStreamMs = 0;
  await client.getWeights({ timeoutMs: 1 }).catch(() => undefined); // the connection
  using clock = new Clock();
  const tensors = { a: { dtype: "U8" as const, shape: [4], data: new Uint8Array(4) } };
  let problem: unknown;
  client.pushTensors(tensors, { version: 1, timeoutMs: Infinity }).catch((error: unknown) => (problem = error));
  while (problem === undefined && numPushStreams < 100) await clock.advance(100);
  expect(problem).toBeInstanceOf(UnavailableError);
});
