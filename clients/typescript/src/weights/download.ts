/** Pulls the served weights, and when the stream breaks, what is missing. */

import { ChecksumMismatchError, GenserveError, PushTruncatedError, WeightVersionMismatchError } from "../errors.js";
import type { Connection } from "../transport/connection.js";
import { exactNumber } from "../transport/fields.js";
import { CALL, checkOptions, type Kinds } from "../transport/options.js";
import { type CallOptions, deadlineOf } from "../transport/timeouts.js";
import {
  type PullWeightsRequest,
  type PullWeightsResponse,
  type PushChunk,
  type PushHeader,
  WeightServiceService,
} from "../wire/genserve/v1/weights.js";
import { loadChecksum } from "./checksum.js";
import type { Checksum } from "./chunk-frame.js";
import { type Dtype, isDtype, sizeBytesOf } from "./dtypes.js";
import { chunkBytesOf } from "./options.js";
import { isInterruption, Outage } from "./outage.js";
import type { Tensor } from "./sources.js";

/** A tensor that was pulled. */
export interface PulledTensor extends Tensor {
  data: Uint8Array;
}

/** A version of the weights, in memory. `pushTensors` takes its tensors. */
export interface PulledWeights {
  weightVersion: number;
  /** By their names in the checkpoint. */
  tensors: Record<string, PulledTensor>;
  totalBytes: number;
}

/** What to pull, and how. */
export interface PullOptions extends CallOptions {
  /** Refuse the pull unless this version is served. */
  version?: number | undefined;
  /** Bytes in a message; default 1 MiB. */
  chunkBytes?: number | undefined;
  /** Called after each chunk. */
  onProgress?: ((receivedBytes: number, totalBytes: number) => void) | undefined;
}

interface PlacedTensor {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: number[];
  readonly start: number;
  readonly data: Uint8Array;
}

const OPTIONS: Kinds<PullOptions> = { ...CALL, version: "uint32", chunkBytes: "int32", onProgress: "function" };

/** One version over one stream at a time. */
export class Download {
  readonly #connection: Connection;
  readonly #options: PullOptions;
  readonly #deadline: number;
  readonly #outage: Outage;
  readonly #chunkBytes: number;
  #version: number | undefined;
  /** In order of their places, which follow each other. Undefined before the first header. */
  #tensors: readonly PlacedTensor[] | undefined;
  #attempt = "";
  #totalBytes = 0;
  #receivedBytes = 0; // chunks arrive in order
  #next = 0; // the tensor that the next byte belongs to

  constructor(connection: Connection, options: PullOptions) {
    checkOptions(options, OPTIONS);
    this.#connection = connection;
    this.#options = options;
    this.#version = options.version;
    this.#chunkBytes = chunkBytesOf(options);
    this.#deadline = deadlineOf(options.timeoutMs ?? connection.timeouts.pushMs);
    const transfer = { name: "a pull", ifLate: "", metadata: {} };
    this.#outage = new Outage(transfer, this.#deadline, options.signal);
  }

  async run(): Promise<PulledWeights> {
    const checksum = await loadChecksum();
    for (;;) {
      try {
        await this.#receive(checksum);
        break;
      } catch (error) {
        if (!isInterruption(error) || this.#tensors === undefined) throw error;
        if (this.#receivedBytes === this.#totalBytes) break;
        await this.#outage.untilNextAttempt(error);
      }
    }
    const tensors = this.#tensors?.map(({ name, dtype, shape, data }) => [name, { dtype, shape, data }] as const) ?? [];
    return {
      weightVersion: this.#version ?? 0,
      tensors: Object.fromEntries(tensors),
      totalBytes: this.#totalBytes,
    };
  }

  async #receive(checksum: Checksum | undefined): Promise<void> {
    const isBegun = this.#receivedBytes > 0;
    const request: PullWeightsRequest = {
      weightVersion: this.#version,
      ranges: isBegun ? [{ start: BigInt(this.#receivedBytes), end: BigInt(this.#totalBytes) }] : [],
      chunkBytes: this.#chunkBytes,
      pushId: "",
    };
    const call = { timeoutMs: this.#deadline - Date.now(), signal: this.#options.signal };
    for await (const { frame } of this.#connection.responses(WeightServiceService.pullWeights, request, call)) {
      if (frame?.$case === "end") {
        this.#checkComplete();
        return;
      }
      this.#take(frame, checksum);
    }
    throw new PushTruncatedError("the stream ended without an end frame");
  }

  #take(frame: PullWeightsResponse["frame"], checksum: Checksum | undefined): void {
    if (frame?.$case === "header") this.#begin(frame.value);
    else if (frame?.$case === "chunk") this.#add(frame.value, checksum);
  }

  #begin(header: PushHeader): void {
    if (this.#tensors !== undefined) {
      if (header.attempt === this.#attempt) return;
      const version = String(this.#version);
      throw new WeightVersionMismatchError(`version ${version} was replaced by another one under its number`, {
        metadata: { weight_version: version },
      });
    }
    let end = 0;
    this.#tensors = (header.manifest?.tensors ?? []).map(({ name, dtype, shape, offset, length }) => {
      const start = exactNumber(offset, `the offset of ${name}`);
      const sizeBytes = exactNumber(length, `the length of ${name}`);
      if (!isDtype(dtype)) throw new GenserveError(`${name} is of type ${JSON.stringify(dtype)}, which is unknown`);
      if (start !== end) throw new GenserveError(`${name} begins at ${start}, the tensor before it ends at ${end}`);
      end += sizeBytes;
      const sizes = shape.map((size) => exactNumber(size, `the shape of ${name}`));
      if (sizeBytes !== sizeBytesOf(dtype, sizes)) {
        throw new GenserveError(
          `${name} has ${sizeBytes} bytes, which are not ${dtype} of shape [${sizes.join(", ")}]`,
        );
      }
      return { name, dtype, shape: sizes, start, data: new Uint8Array(sizeBytes) };
    });
    if (new Set(this.#tensors.map(({ name }) => name)).size < this.#tensors.length) {
      throw new GenserveError("the daemon sent two tensors of one name");
    }
    this.#version = header.weightVersion;
    this.#attempt = header.attempt;
    this.#totalBytes = end;
  }

  #checkComplete(): void {
    if (this.#tensors !== undefined && this.#receivedBytes === this.#totalBytes) return;
    throw new GenserveError(`the daemon ended a pull after ${this.#receivedBytes} of ${this.#totalBytes} bytes`);
  }

  #add({ offset, data, crc32c }: PushChunk, checksum: Checksum | undefined): void {
    if (this.#tensors === undefined || offset !== BigInt(this.#receivedBytes)) {
      throw new GenserveError(`the daemon sent bytes from ${offset} on after the first ${this.#receivedBytes}`);
    }
    if (crc32c !== undefined && checksum !== undefined && checksum(data) !== crc32c) {
      throw new ChecksumMismatchError(`the chunk of ${data.length} bytes at ${offset} was damaged`);
    }
    for (let taken = 0; taken < data.length;) {
      const tensor = this.#tensors[this.#next];
      if (tensor === undefined) throw new GenserveError("the daemon sent more bytes than its manifest has");
      const position = this.#receivedBytes - tensor.start;
      const part = data.subarray(taken, taken + tensor.data.length - position);
      tensor.data.set(part, position);
      taken += part.length;
      this.#receivedBytes += part.length;
      if (position + part.length === tensor.data.length) this.#next++;
    }
    this.#outage.over();
    this.#options.onProgress?.(this.#receivedBytes, this.#totalBytes);
  }
}
