import { join } from "node:path";
import {
  CheckpointFileError,
  ChecksumMismatchError,
  Client,
  InvalidFieldError,
  ManifestMismatchError,
  type PushProgress,
  type Tensor,
  UnavailableError,
  VersionNotNewerError,
  WeightVersionMismatchError,
} from "genserve";
import { afterAll, beforeAll, beforeEach, expect, test } from "vitest";
import { digestsOf, newDirectory, randomTensors, writeSafetensors, writeShards } from "./checkpoints.js";
import { ScriptedDaemon } from "./scripted-daemon.js";

const CHUNK_BYTES = 64 << 10;

let daemon: ScriptedDaemon;
let client: Client;
let tensors: Record<string, Tensor>;
let version = 0;

beforeAll(async () => {
  daemon = await ScriptedDaemon.start();
  client = new Client(daemon.address);
});
afterAll(async () => {
  client.close();
  await daemon.stop();
});
beforeEach(() => {
  tensors = randomTensors();
  version += 10;
});

test("the bytes of a file are live after its push", async () => {
  const path = await writeSafetensors(join(await newDirectory(), "model.safetensors"), tensors);
  const progress: PushProgress[] = [];
  const result = await client.pushCheckpoint(path, { version, onProgress: (each) => progress.push(each) });
  expect(result.push).toMatchObject({ state: "applied", weightVersion: version, missing: [] });
  expect(result.applied?.activeVersion).toBe(version);
  expect(Object.keys(result.applied?.stepMs ?? {})).toContain("commit");
  expect((await daemon.engine()).live).toEqual(digestsOf(tensors));
  const totalBytes = (8 << 20) + 16;
  expect(progress.at(-1)).toMatchObject({ sentBytes: totalBytes, totalBytes, numResumes: 0 });
});

test("the bytes of a sharded checkpoint are live after its push, whichever way its index is named", async () => {
  const directory = await writeShards(await newDirectory(), tensors);
  await client.pushCheckpoint(directory, { version });
  expect((await daemon.engine()).live).toEqual(digestsOf(tensors));
  const again = await client.pushCheckpoint(join(directory, "model.safetensors.index.json"), { version: version + 1 });
  expect(again.applied?.activeVersion).toBe(version + 1);
});

test("tensors in memory can be pushed, a part of them too", async () => {
  await client.pushTensors(tensors, { version });
  const norm: Tensor = { dtype: "F32", shape: [4], data: new Float32Array([5, 6, 7, 8]) };
  await client.pushTensors({ norm }, { version: version + 1, partial: true });
  expect((await daemon.engine()).live).toEqual(digestsOf({ ...tensors, norm }));
});

test("a push whose connection is cut is resumed with what is missing", async () => {
  await daemon.throttle(4 << 20);
  using throughProxy = new Client(daemon.proxy);
  let cuts = 0;
  let sentInAll = 0;
  const result = await throughProxy.pushTensors(tensors, {
    version,
    chunkBytes: CHUNK_BYTES,
    onProgress: ({ sentBytes }) => {
      sentInAll += CHUNK_BYTES;
      if (cuts === 0 && sentBytes > 6 << 20) {
        cuts++;
        void daemon.reset();
      }
    },
  });
  await daemon.throttle(0);
  expect(result.push.state).toBe("applied");
  expect((await daemon.engine()).live).toEqual(digestsOf(tensors));
  expect(cuts).toBe(1);
  expect(sentInAll).toBeLessThan(14 << 20); // not everything twice
});

test("a push is sent no faster than the daemon takes it", async () => {
  await daemon.throttle(1 << 20);
  using throughProxy = new Client(daemon.proxy);
  const signal = AbortSignal.timeout(700);
  let sent = 0;
  const pushing = throughProxy.pushTensors(tensors, {
    version,
    chunkBytes: CHUNK_BYTES,
    signal,
    onProgress: ({ sentBytes }) => (sent = sentBytes),
  });
  await expect(pushing).rejects.toMatchObject({ name: "TimeoutError" });
  await daemon.throttle(0);
  expect(sent).toBeLessThan(7 << 20); // of 8 MiB: kernels and the proxy buffer some
});

test("a push to nobody fails at once, because there is nothing to resume", { timeout: 30_000 }, async () => {
  using nobody = new Client("127.0.0.1:1");
  await expect(nobody.pushTensors(tensors, { version })).rejects.toBeInstanceOf(UnavailableError);
});

test("aborting a push applies nothing", async () => {
  const before = (await daemon.engine()).live;
  const controller = new AbortController();
  const pushing = client.pushTensors(tensors, {
    version,
    chunkBytes: CHUNK_BYTES,
    signal: controller.signal,
    onProgress: ({ sentBytes }) => {
      if (sentBytes > 1 << 20) controller.abort();
    },
  });
  await expect(pushing).rejects.toMatchObject({ name: "AbortError" });
  expect((await daemon.engine()).live).toEqual(before);
});

test("a staged push is applied by its commit", async () => {
  const before = (await daemon.engine()).live;
  const { push, applied } = await client.pushTensors(tensors, { version, action: "stage", pushId: "staged" });
  expect(push).toMatchObject({ pushId: "staged", state: "staged" });
  expect(applied).toBeUndefined();
  expect((await daemon.engine()).live).toEqual(before);
  expect((await client.commitPush("staged")).applied?.activeVersion).toBe(version);
  expect((await daemon.engine()).live).toEqual(digestsOf(tensors));
  expect((await client.getPush("staged")).push.state).toBe("applied");
});

test("a staged push can be discarded", async () => {
  await client.pushTensors(tensors, { version, action: "stage", pushId: "discarded" });
  await client.discardPush("discarded");
  await expect(client.getPush("discarded")).rejects.toMatchObject({ reason: "PUSH_NOT_FOUND" });
});

test("a push that only validates sends no bytes", async () => {
  let wasCalled = false;
  const { push } = await client.pushTensors(tensors, {
    version,
    action: "validate",
    onProgress: () => (wasCalled = true),
  });
  expect(push.state).toBe("valid");
  expect(wasCalled).toBe(false);
});

test("what the daemon does not serve is refused by the names of the tensors", async () => {
  const wrong = { ...tensors, norm: { dtype: "F32", shape: [2], data: new Float32Array(2) } as Tensor };
  const pushing = client.pushTensors(wrong, { version });
  await expect(pushing).rejects.toBeInstanceOf(ManifestMismatchError);
  await expect(pushing).rejects.toThrow("norm");
});

test("other refusals have classes of their own", async () => {
  await expect(client.pushTensors(tensors, { version: 1 })).rejects.toBeInstanceOf(VersionNotNewerError);
  const contentDigest = "0".repeat(64);
  await expect(client.pushTensors(tensors, { version, contentDigest })).rejects.toBeInstanceOf(ChecksumMismatchError);
  const expecting = client.pushTensors(tensors, { version, expectedVersion: version + 5 });
  await expect(expecting).rejects.toBeInstanceOf(WeightVersionMismatchError);
});

test("mistakes of the caller are found before anything is sent", async () => {
  await expect(client.pushTensors({}, { version })).rejects.toBeInstanceOf(InvalidFieldError);
  const short = { norm: { dtype: "F32", shape: [4], data: new Float32Array(3) } as Tensor };
  await expect(client.pushTensors(short, { version })).rejects.toThrow("12 bytes are not F32 of shape [4]");
  await expect(client.pushTensors(tensors, { version: 1.5 })).rejects.toThrow("version");
  await expect(client.pushTensors(tensors, {} as never)).rejects.toThrow("version: must be given");
  await expect(client.pushTensors(tensors, undefined as never)).rejects.toThrow("options: must be an object");
  await expect(client.pushCheckpoint(await newDirectory(), { version })).rejects.toBeInstanceOf(CheckpointFileError);
});

test.each([
  ["an ArrayBuffer", { data: new ArrayBuffer(16) }, "the data must be a typed array"],
  ["an object with a length", { data: { byteLength: 16 } }, "the data must be a typed array"],
  ["no data", { data: undefined }, "the data must be a typed array"],
  ["a shape that is text", { shape: "4" }, "the shape must be a list of whole numbers"],
  ["a shape of bigints", { shape: [4n] }, "the shape must be a list of whole numbers"],
  ["a type that is a number", { dtype: 4n }, "dtype 4 is unknown"],
])("a tensor with %s is refused, for it has no bytes to send", async (_, wrong, problem) => {
  const pushing = client.pushTensors({ norm: { ...tensors["norm"], ...wrong } as Tensor }, { version, partial: true });
  await expect(pushing).rejects.toBeInstanceOf(InvalidFieldError);
  await expect(pushing).rejects.toThrow(`tensors["norm"]: ${problem}`);
});

test("the served weights are told", async () => {
  await client.pushTensors(tensors, { version, pushId: "served" });
  const served = await client.getWeights({ includeDigests: true });
  expect(served).toMatchObject({ weightVersion: version, pushId: "served", resident: true });
  expect(served.tensors.find(({ name }) => name === "norm")).toEqual({ name: "norm", dtype: "F32", shape: [4] });
  expect(served.totalBytes).toBe((8 << 20) + 16);
  expect(served.digests).toEqual([{ rank: "dp0:pp0:pcp0:tp0", name: "w", sha256: "ab" }]);
});

test("what is served can be pulled, and pushed again", async () => {
  await client.pushTensors(tensors, { version });
  let received = 0;
  const pulled = await client.pullWeights({
    version,
    chunkBytes: CHUNK_BYTES,
    onProgress: (bytes) => (received = bytes),
  });
  expect(pulled).toMatchObject({ weightVersion: version, totalBytes: (8 << 20) + 16 });
  expect(received).toBe(pulled.totalBytes);
  expect(digestsOf(pulled.tensors)).toEqual(digestsOf(tensors));
  expect(pulled.tensors["norm"]).toMatchObject({ dtype: "F32", shape: [4] });
  await client.pushTensors(pulled.tensors, { version: version + 1 });
  await expect(client.pullWeights({ version })).rejects.toBeInstanceOf(WeightVersionMismatchError);
});

test("a pull whose connection is cut goes on where it was cut", async () => {
  await client.pushTensors(tensors, { version });
  using throughProxy = new Client(daemon.proxy);
  const positions: number[] = [];
  const pulled = await throughProxy.pullWeights({
    chunkBytes: CHUNK_BYTES,
    onProgress: (bytes) => {
      positions.push(bytes);
      if (positions.length === 20) void daemon.reset();
    },
  });
  expect(digestsOf(pulled.tensors)).toEqual(digestsOf(tensors));
  expect(positions).toEqual([...positions].sort((a, b) => a - b));
  expect(new Set(positions).size).toBe(positions.length); // nothing twice
});
