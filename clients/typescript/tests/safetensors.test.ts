import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { CheckpointFileError } from "genserve";
import { expect, test } from "vitest";
import { Checkpoint } from "../src/weights/checkpoint.js";
import { encodedHeader, newDirectory } from "./checkpoints.js";

const entry = (dtype: unknown, shape: unknown, data_offsets: unknown) => ({ dtype, shape, data_offsets });

async function written(header: unknown, dataBytes: number): Promise<string> {
  const path = join(await newDirectory(), "model.safetensors");
  await writeFile(path, Buffer.concat([encodedHeader(header), Buffer.alloc(dataBytes)]));
  return path;
}

test.each([
  ["a gap", { a: entry("U8", [1], [0, 1]), b: entry("U8", [1], [2, 3]) }, 3, "b: begins at 2"],
  ["an overlap", { a: entry("U8", [2], [0, 2]), b: entry("U8", [2], [1, 3]) }, 3, "b: begins at 1"],
  ["bytes behind the last tensor", { a: entry("U8", [1], [0, 1]) }, 2, "2 bytes of data, 1 in the header"],
  ["an end outside of the file", { a: entry("U8", [9], [0, 9]) }, 2, "may be truncated"],
  ["a size that is not that of its shape", { a: entry("F32", [2], [0, 4]) }, 4, "4 bytes cannot hold F32 [2]"],
  ["an unknown type", { a: entry("F4", [2], [0, 1]) }, 1, 'dtype "F4" is unknown'],
  ["a shape that is not of whole numbers", { a: entry("U8", [1.5], [0, 1]) }, 1, "in whole numbers"],
  ["an offset below 0", { a: entry("U8", [1], [-1, 0]) }, 1, "in whole numbers"],
  ["no object", [1], 1, "not a JSON object"],
])("a file with %s is refused", async (_, header, dataBytes, problem) => {
  const opening = Checkpoint.open(await written(header, dataBytes));
  await expect(opening).rejects.toBeInstanceOf(CheckpointFileError);
  await expect(opening).rejects.toThrow(problem);
});

test("another file is not read further than its first bytes", async () => {
  const path = join(await newDirectory(), "other");
  await writeFile(path, "a text that is longer than eight bytes");
  await expect(Checkpoint.open(path)).rejects.toThrow("not a safetensors file");
  await writeFile(path, "short");
  await expect(Checkpoint.open(path)).rejects.toThrow("not a safetensors file");
});

test.each([
  [{ weight_map: { a: "../model.safetensors" } }, "is not the name of a .safetensors file beside it"],
  [{ weight_map: { b: "model.safetensors" } }, "model.safetensors has no b"],
  [{}, "has no weight_map"],
])("the index %j is refused", async (index, problem) => {
  const path = await written({ a: entry("U8", [1], [0, 1]) }, 1);
  await writeFile(`${path}.index.json`, JSON.stringify(index));
  await expect(Checkpoint.open(`${path}.index.json`)).rejects.toThrow(problem);
});

test("a tensor that the index does not name is left out", async () => {
  const path = await written({ a: entry("U8", [1], [0, 1]), b: entry("U8", [1], [1, 2]) }, 2);
  await writeFile(`${path}.index.json`, JSON.stringify({ weight_map: { b: "model.safetensors" } }));
  await using checkpoint = await Checkpoint.open(`${path}.index.json`);
  expect(checkpoint.tensors.map(({ name }) => name)).toEqual(["b"]);
});
