/**
 * Reads safetensors files (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length, the
 * header as JSON, then the tensors end to end. A file is not trusted: every number is checked against the file's size.
 */

import { type FileHandle, open } from "node:fs/promises";
import { isObject } from "../transport/fields.js";
import { isDtype, sizeBytesOf } from "./dtypes.js";
import type { TensorSource } from "./sources.js";

const MAX_HEADER_BYTES = 100_000_000; // the limit of the reference implementation
const LENGTH_BYTES = 8;

/** A file of a checkpoint is not valid or cannot be read. The message names it. */
export class CheckpointFileError extends Error {
  constructor(path: string, problem: string, cause?: unknown) {
    super(`${path}: ${problem}`, cause === undefined ? undefined : { cause });
    this.name = new.target.name;
  }
}

/** An open file; its tensors can be read until it is closed. */
export class SafetensorsFile implements AsyncDisposable {
  readonly tensors: readonly TensorSource[];
  readonly #file: FileHandle;

  private constructor(file: FileHandle, tensors: readonly TensorSource[]) {
    this.#file = file;
    this.tensors = tensors;
  }

  /** Throws CheckpointFileError, or an error of the operating system. */
  static async open(path: string): Promise<SafetensorsFile> {
    const file = await open(path);
    try {
      return new SafetensorsFile(file, await readTensors(path, file));
    } catch (error) {
      await file.close();
      throw error;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#file.close();
  }
}

/** What a JSON document holds, if it is an object. */
export function parseObject(path: string, text: string): Readonly<Record<string, unknown>> {
  let document: unknown;
  try {
    document = JSON.parse(text);
  } catch (error) {
    throw new CheckpointFileError(path, `not JSON: ${(error as Error).message}`, error);
  }
  if (!isObject(document)) throw new CheckpointFileError(path, "not a JSON object");
  return document;
}

async function readTensors(path: string, file: FileHandle): Promise<TensorSource[]> {
  const { size } = await file.stat();
  const start = Buffer.alloc(LENGTH_BYTES);
  if (size >= LENGTH_BYTES) await fill(path, file, start, 0);
  const headerBytes = Number(start.readBigUInt64LE());
  // Bounded before it is read: another file would ask for any amount.
  if (headerBytes < 2 || headerBytes > MAX_HEADER_BYTES || LENGTH_BYTES + headerBytes > size) {
    throw new CheckpointFileError(path, `not a safetensors file: its header would be ${headerBytes} bytes long`);
  }
  const header = Buffer.alloc(headerBytes);
  await fill(path, file, header, LENGTH_BYTES);
  const dataStart = LENGTH_BYTES + headerBytes;
  const { __metadata__: _, ...entries } = parseObject(path, header.toString("utf8"));
  const places = Object.entries(entries).map(([name, entry]) => placeOf(path, name, entry, size - dataStart));
  places.sort((a, b) => a.begin - b.begin || a.sizeBytes - b.sizeBytes);
  let end = 0;
  for (const { name, begin, sizeBytes } of places) {
    if (begin !== end) {
      throw new CheckpointFileError(path, `${name}: begins at ${begin}, the one before it ends at ${end}`);
    }
    end += sizeBytes;
  }
  if (end !== size - dataStart) {
    throw new CheckpointFileError(path, `${size - dataStart} bytes of data, ${end} in the header`);
  }
  return places.map(({ begin, ...tensor }) => ({
    ...tensor,
    read: (target, position) => fill(path, file, target, dataStart + begin + position),
  }));
}

interface Place extends Omit<TensorSource, "read"> {
  begin: number;
}

function placeOf(path: string, name: string, entry: unknown, dataBytes: number): Place {
  const { dtype, shape, data_offsets: offsets } = isObject(entry) ? entry : {};
  if (!areSizes(shape) || !areSizes(offsets) || offsets.length !== 2) {
    throw new CheckpointFileError(path, `${name}: needs dtype, shape and two data_offsets, in whole numbers`);
  }
  if (!isDtype(dtype)) throw new CheckpointFileError(path, `${name}: dtype ${JSON.stringify(dtype)} is unknown`);
  const [begin, end] = offsets as [number, number];
  if (begin > end || end > dataBytes) {
    const span = `bytes ${begin} to ${end}`;
    throw new CheckpointFileError(
      path,
      `${name}: ${span} lie outside the ${dataBytes} of the file, which may be truncated`,
    );
  }
  const sizeBytes = end - begin;
  if (sizeBytes !== sizeBytesOf(dtype, shape)) {
    throw new CheckpointFileError(path, `${name}: ${sizeBytes} bytes cannot hold ${dtype} [${shape.join(", ")}]`);
  }
  return { name, dtype, shape, sizeBytes, begin };
}

function areSizes(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((each) => Number.isSafeInteger(each) && (each as number) >= 0);
}

async function fill(path: string, file: FileHandle, target: Uint8Array, position: number): Promise<void> {
  let done = 0;
  while (done < target.length) {
    const { bytesRead } = await file.read(target, done, target.length - done, position + done);
    if (bytesRead === 0) throw new CheckpointFileError(path, "has become shorter while it was read");
    done += bytesRead;
  }
}
