/** The flat byte space of a push: tensors end to end in order of their names. */

import { createHash } from "node:crypto";
import { InvalidFieldError } from "../errors.js";
import type { Manifest, TensorSpec } from "../wire/genserve/v1/weights.js";
import type { ByteRange } from "./ranges.js";
import type { TensorSource } from "./sources.js";

interface PlacedTensor {
  readonly source: TensorSource;
  readonly start: number;
  readonly end: number;
}

export class ByteSpace {
  readonly totalBytes: number;
  readonly #tensors: readonly PlacedTensor[];

  /** Throws InvalidFieldError for a name that occurs twice, and for no tensor at all. */
  constructor(sources: readonly TensorSource[]) {
    if (sources.length === 0) throw InvalidFieldError.of("tensors", "there are no weights to push");
    let end = 0;
    this.#tensors = inOrder(sources).map((source) => ({ source, start: end, end: (end += source.sizeBytes) }));
    this.totalBytes = end;
  }

  /** All of it. */
  get ranges(): ByteRange[] {
    return [[0, this.totalBytes]];
  }

  /** The manifest. `partial`: the checkpoint's other tensors keep their present values. */
  manifest(partial: boolean): Manifest {
    const tensors = this.#tensors.map(({ source, start }): TensorSpec => ({
      name: source.name,
      dtype: source.dtype,
      shape: source.shape.map(BigInt),
      offset: BigInt(start),
      length: BigInt(source.sizeBytes),
    }));
    return { tensors, totalBytes: BigInt(this.totalBytes), partial };
  }

  /** SHA-256, in hex, of the tensors in order of their names, as weights.proto defines it. */
  get manifestDigest(): string {
    const digest = createHash("sha256");
    for (const { source, start } of this.#tensors) {
      const fields = [source.name, source.dtype, source.shape.join(","), start, source.sizeBytes];
      digest.update(`${fields.join("\t")}\n`);
    }
    return digest.digest("hex");
  }

  /** Fills `target` with the bytes from `offset` on, which may be of several tensors. */
  async read(target: Uint8Array, offset: number): Promise<void> {
    const end = offset + target.length;
    for (let index = this.#indexAt(offset), position = offset; position < end; index++) {
      const tensor = this.#tensors[index]!;
      const partEnd = Math.min(end, tensor.end);
      await tensor.source.read(target.subarray(position - offset, partEnd - offset), position - tensor.start);
      position = partEnd;
    }
  }

  /** The first tensor that ends behind `offset`. */
  #indexAt(offset: number): number {
    let [low, high] = [0, this.#tensors.length];
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.#tensors[middle]!.end > offset) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** By code points, as the daemon sorts names; JavaScript would compare halves of surrogate pairs. */
function inOrder(sources: readonly TensorSource[]): TensorSource[] {
  const keyed = sources.map((source) => ({ source, key: Buffer.from(source.name) }));
  keyed.sort((a, b) => Buffer.compare(a.key, b.key));
  for (const [index, { source }] of keyed.entries()) {
    if (source.name === keyed[index - 1]?.source.name) {
      throw InvalidFieldError.of("tensors", `${JSON.stringify(source.name)} occurs twice`);
    }
  }
  return keyed.map(({ source }) => source);
}
