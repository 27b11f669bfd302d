/** The tensors of a checkpoint: a safetensors file, or a directory with an index, one file or several. */

import { readdir, readFile, stat } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { isObject } from "../transport/fields.js";
import { CheckpointFileError, parseObject, SafetensorsFile } from "./safetensors.js";
import type { TensorSource } from "./sources.js";

const SUFFIX = ".safetensors";
const INDEX_SUFFIX = ".safetensors.index.json";

/** Open files, and the tensors that a checkpoint has of them. */
export class Checkpoint implements AsyncDisposable {
  readonly tensors: readonly TensorSource[];
  readonly #files: readonly SafetensorsFile[];

  private constructor(files: readonly SafetensorsFile[], tensors: readonly TensorSource[]) {
    this.#files = files;
    this.tensors = tensors;
  }

  /** Throws CheckpointFileError, or an error of the operating system. */
  static async open(path: string): Promise<Checkpoint> {
    if (path.endsWith(INDEX_SUFFIX)) return Checkpoint.#openIndex(path);
    if (!(await stat(path)).isDirectory()) return Checkpoint.#openFiles([path]);
    const names = (await readdir(path)).sort();
    const indices = names.filter((name) => name.endsWith(INDEX_SUFFIX));
    if (indices.length > 1) throw new CheckpointFileError(path, `has ${indices.length} indices; give one file`);
    if (indices[0] !== undefined) return Checkpoint.#openIndex(join(path, indices[0]));
    const files = names.filter((name) => name.endsWith(SUFFIX));
    if (files.length === 0) throw new CheckpointFileError(path, `has no ${SUFFIX} file`);
    return Checkpoint.#openFiles(files.map((name) => join(path, name)));
  }

  static async #openFiles(paths: readonly string[]): Promise<Checkpoint> {
    const files = await openAll(paths);
    return new Checkpoint(
      files,
      files.flatMap((file) => file.tensors),
    );
  }

  static async #openIndex(index: string): Promise<Checkpoint> {
    const weightMap = await readWeightMap(index);
    const shards = [...new Set(weightMap.values())].sort();
    const files = await openAll(shards.map((shard) => join(dirname(index), shard)));
    const checkpoint = new Checkpoint(files, []);
    const found = new Map<string, TensorSource>();
    for (const [position, shard] of shards.entries()) {
      for (const tensor of files[position]?.tensors ?? []) {
        if (weightMap.get(tensor.name) === shard) found.set(tensor.name, tensor);
      }
    }
    for (const [name, shard] of weightMap) {
      if (found.has(name)) continue;
      await checkpoint[Symbol.asyncDispose]();
      throw new CheckpointFileError(index, `${shard} has no ${name}`);
    }
    return new Checkpoint(files, [...found.values()]);
  }

  /** Closes the files. */
  async [Symbol.asyncDispose](): Promise<void> {
    await closeAll(this.#files);
  }
}

async function openAll(paths: readonly string[]): Promise<SafetensorsFile[]> {
  const files: SafetensorsFile[] = [];
  try {
    for (const path of paths) files.push(await SafetensorsFile.open(path));
    return files;
  } catch (error) {
    await closeAll(files);
    throw error;
  }
}

async function closeAll(files: readonly SafetensorsFile[]): Promise<void> {
  for (const file of files) await file[Symbol.asyncDispose]();
}

async function readWeightMap(index: string): Promise<Map<string, string>> {
  const { weight_map: weightMap } = parseObject(index, await readFile(index, "utf8"));
  if (!isObject(weightMap)) throw new CheckpointFileError(index, "has no weight_map");
  const entries = Object.entries(weightMap);
  for (const [, shard] of entries) {
    if (typeof shard !== "string" || basename(shard) !== shard || !shard.endsWith(SUFFIX)) {
      const problem = `${JSON.stringify(shard)} is not the name of a ${SUFFIX} file beside it`;
      throw new CheckpointFileError(index, problem);
    }
  }
  return new Map(entries as [string, string][]);
}
