/** Checkpoints that the scripted daemon takes, written as safetensors files. */

import { createHash, randomBytes } from "node:crypto";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Tensor } from "genserve";

/** Random tensors of the names, types and shapes that the scripted daemon serves. */
export function randomTensors(): Record<string, Tensor> {
  return {
    norm: { dtype: "F32", shape: [4], data: new Float32Array([1, 2, 3, Math.random()]) },
    "layers.0.weight": { dtype: "BF16", shape: [1024, 2048], data: randomBytes(4 << 20) },
    "layers.1.weight": { dtype: "BF16", shape: [1024, 2048], data: randomBytes(4 << 20) },
  };
}

/** SHA-256 of each tensor. */
export function digestsOf(tensors: Record<string, Tensor>): Record<string, string> {
  const digests = Object.entries(tensors).map(([name, { data }]) => [
    name,
    createHash("sha256").update(bytesOf(data)).digest("hex"),
  ]);
  return Object.fromEntries(digests) as Record<string, string>;
}

/** A new directory. */
export function newDirectory(): Promise<string> {
  return mkdtemp(join(tmpdir(), "genserve-"));
}

/** Writes one file in the order of the tensors, which is not that of their names. */
export async function writeSafetensors(path: string, tensors: Record<string, Tensor>): Promise<string> {
  const header: Record<string, unknown> = { __metadata__: { format: "pt" } };
  let end = 0;
  for (const [name, { dtype, shape, data }] of Object.entries(tensors)) {
    header[name] = { dtype, shape, data_offsets: [end, (end += data.byteLength)] };
  }
  await writeFile(
    path,
    Buffer.concat([encodedHeader(header), ...Object.values(tensors).map(({ data }) => bytesOf(data))]),
  );
  return path;
}

/** The beginning of a file with this header. */
export function encodedHeader(header: unknown): Buffer {
  const text = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, text]);
}

/** Writes a file for each tensor, and their index; the path of the directory. */
export async function writeShards(directory: string, tensors: Record<string, Tensor>): Promise<string> {
  const weightMap: Record<string, string> = {};
  for (const [number, [name, tensor]] of Object.entries(tensors).entries()) {
    weightMap[name] = `model-${number}.safetensors`;
    await writeSafetensors(join(directory, weightMap[name]), { [name]: tensor });
  }
  await writeFile(join(directory, "model.safetensors.index.json"), JSON.stringify({ weight_map: weightMap }));
  return directory;
}

function bytesOf(data: ArrayBufferView): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}
