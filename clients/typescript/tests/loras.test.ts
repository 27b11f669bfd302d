import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import {
  CheckpointFileError,
  Client,
  InvalidFieldError,
  type LoraAdapter,
  LoraNotFoundError,
  VersionNotNewerError,
  WeightVersionMismatchError,
} from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import { newDirectory, writeSafetensors } from "./checkpoints.js";
import { ScriptedDaemon } from "./scripted-daemon.js";

const RANK = 2;
const PREFIX = "base_model.model.layers.0";
const ADAPTER: LoraAdapter = {
  tensors: {
    [`${PREFIX}.lora_A.weight`]: { dtype: "F32", shape: [RANK, 2048], data: new Float32Array(RANK * 2048) },
    [`${PREFIX}.lora_B.weight`]: { dtype: "F32", shape: [1024, RANK], data: new Float32Array(1024 * RANK) },
  },
  config: { r: RANK, lora_alpha: 4, target_modules: ["0"] },
};
const SIZE_BYTES = 4 * RANK * (2048 + 1024);

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

/** A directory with the adapter, as PEFT saves it. */
async function saved(config = JSON.stringify(ADAPTER.config)): Promise<string> {
  const directory = await newDirectory();
  await writeSafetensors(join(directory, "adapter_model.safetensors"), ADAPTER.tensors);
  await writeFile(join(directory, "adapter_config.json"), config);
  return directory;
}

test("an adapter in memory is pushed, and requests can name it", async () => {
  const { push, applied } = await client.pushLora("memory", ADAPTER, { pushId: "of-memory" });
  expect(push).toMatchObject({ pushId: "of-memory", state: "applied", receivedBytes: SIZE_BYTES });
  expect(applied?.activeVersion).toBe(0);
  expect(await client.listLoras()).toMatchObject([{ loraName: "memory", rank: RANK, source: "push of-memory" }]);
  await client.generate("hello", { loraName: "memory" });
  expect((await daemon.engine()).loras).toEqual(["memory"]);
  expect(await client.unloadLora("memory")).toMatchObject({ loraName: "memory", runningRequests: 2 });
  expect(await client.listLoras()).toEqual([]);
});

test("a push gives an adapter its version, or the daemon does", async () => {
  const versions = [];
  for (const options of [{}, { version: 500 }, { expectedVersion: 500 }, { version: 7, force: true }]) {
    versions.push((await client.pushLora("policy", ADAPTER, options)).push.weightVersion);
  }
  expect(versions).toEqual([1, 500, 501, 7]);
  await expect(client.pushLora("policy", ADAPTER, { version: 7 })).rejects.toBeInstanceOf(VersionNotNewerError);
  await expect(client.pushLora("policy", ADAPTER, { version: 0 })).rejects.toThrow("version: 0 is not above 0");
  const other = client.pushLora("policy", ADAPTER, { expectedVersion: 0 });
  await expect(other).rejects.toBeInstanceOf(WeightVersionMismatchError);
  expect(await client.unloadLora("policy")).toMatchObject({ loraName: "policy", version: 7 });
});

test("an adapter is pushed from a directory here, or loaded from one on the daemon's host", async () => {
  const directory = await saved();
  await client.pushLora("pushed", directory);
  const loaded = await client.loadLora("loaded", directory, { timeoutMs: Infinity });
  expect(loaded).toMatchObject({ loraName: "loaded", rank: RANK, source: directory });
  expect(loaded.loadTime).toBeInstanceOf(Date);
  const loras = await client.listLoras();
  expect(loras.map(({ loraName }) => loraName)).toEqual(["loaded", "pushed"]);
  expect(Math.min(...loras.map(({ sizeBytes }) => sizeBytes))).toBeGreaterThan(SIZE_BYTES);
});

test("what is no adapter is refused by what is wrong with it", async () => {
  const { tensors, config } = ADAPTER;
  const pushing = client.pushLora("wrong", { tensors, config: { ...config, r: "two" } });
  await expect(pushing).rejects.toBeInstanceOf(InvalidFieldError);
  await expect(pushing).rejects.toThrow("header.lora.config");
  await expect(client.pushLora("wrong", await saved("[]"))).rejects.toBeInstanceOf(CheckpointFileError);
  await expect(client.pushLora("wrong", await newDirectory())).rejects.toThrow("adapter_config.json");
  await expect(client.pushLora("wrong", ADAPTER, { action: "stage" } as object)).rejects.toThrow("action");
  await expect(client.unloadLora("wrong")).rejects.toBeInstanceOf(LoraNotFoundError);
});
