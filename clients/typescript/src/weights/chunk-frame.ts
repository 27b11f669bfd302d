/** A chunk of weights as the bytes of its frame, whose data are written in place: protobuf's writer would copy them. */

import { EventEmitter, once } from "node:events";

// Tags: field number << 3 | wire type.
const FRAME_CHUNK = 0x12;
const CHUNK_OFFSET = 0x08;
const CHUNK_DATA = 0x12;
const CHUNK_CRC32C = 0x1d;
const CHECKSUM_BYTES = 5;

/** The checksum of the bytes of a chunk. */
export type Checksum = (data: Uint8Array) => number;

const HEAD_BYTES = 32; // more than two tags, two lengths and an offset take

/** A PushWeightsRequest with a chunk, in memory that is used again. */
export class ChunkFrame {
  readonly #checksum: Checksum | undefined;
  readonly #memory: Buffer;
  #start = HEAD_BYTES;
  #end = HEAD_BYTES;

  /** One with room for `maxBytes` of data; without a checksum if there is no way to compute it. */
  constructor(maxBytes: number, checksum: Checksum | undefined) {
    this.#checksum = checksum;
    this.#memory = Buffer.allocUnsafeSlow(HEAD_BYTES + maxBytes + CHECKSUM_BYTES);
  }

  /** Begins the frame of a chunk, and returns where its `sizeBytes` of data go. */
  begin(offset: number, sizeBytes: number): Buffer {
    const inner = [...(offset > 0 ? [CHUNK_OFFSET, ...varint(offset)] : []), CHUNK_DATA, ...varint(sizeBytes)];
    const tailBytes = this.#checksum === undefined ? 0 : CHECKSUM_BYTES;
    const head = [FRAME_CHUNK, ...varint(inner.length + sizeBytes + tailBytes), ...inner];
    this.#start = HEAD_BYTES - head.length;
    this.#end = HEAD_BYTES + sizeBytes;
    this.#memory.set(head, this.#start);
    return this.#memory.subarray(HEAD_BYTES, this.#end);
  }

  /** The bytes of the frame, whose data must be complete: their checksum is added. */
  seal(): Buffer {
    if (this.#checksum === undefined) return this.#memory.subarray(this.#start, this.#end);
    const crc32c = this.#checksum(this.#memory.subarray(HEAD_BYTES, this.#end));
    this.#memory[this.#end] = CHUNK_CRC32C;
    this.#memory.writeUInt32LE(crc32c, this.#end + 1);
    return this.#memory.subarray(this.#start, this.#end + CHECKSUM_BYTES);
  }
}

/**
 * The frames of one stream. A frame is used again after its write, because V8 collects garbage each time some megabytes
 * of buffers have been allocated, which costs a push much of its CPU time.
 */
export class ChunkFrames {
  readonly #free: ChunkFrame[] = [];
  readonly #released = new EventEmitter();
  readonly #newFrame: () => ChunkFrame;
  #numUnmade: number;

  /** No more than `maxFrames` of `maxBytes` of data each, made when they are needed. */
  constructor(maxFrames: number, maxBytes: number, checksum: Checksum | undefined) {
    this.#numUnmade = maxFrames;
    this.#newFrame = () => new ChunkFrame(maxBytes, checksum);
  }

  /** A frame that nobody uses; waits for one. For one caller at a time. Throws AbortError. */
  async take(signal: AbortSignal): Promise<ChunkFrame> {
    if (this.#free.length === 0 && this.#numUnmade === 0) await once(this.#released, "frame", { signal });
    signal.throwIfAborted();
    const frame = this.#free.pop();
    if (frame !== undefined) return frame;
    this.#numUnmade--;
    return this.#newFrame();
  }

  /** Takes back a frame whose bytes nobody reads any more. */
  release(frame: ChunkFrame): void {
    this.#free.push(frame);
    this.#released.emit("frame");
  }
}

function varint(value: number): number[] {
  const bytes: number[] = [];
  for (let rest = value; ; rest = Math.floor(rest / 0x80)) {
    if (rest < 0x80) return [...bytes, rest];
    bytes.push((rest % 0x80) | 0x80);
  }
}
