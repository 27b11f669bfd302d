/** A chunk of weights as the bytes of its frame, whose data are written in place: protobuf's writer would copy them. */

// Tags: field number << 3 | wire type.
const FRAME_CHUNK = 0x12;
const CHUNK_OFFSET = 0x08;
const CHUNK_DATA = 0x12;
const CHUNK_CRC32C = 0x1d;
const CHECKSUM_BYTES = 5;

/** The checksum of the bytes of a chunk. */
export type Checksum = (data: Uint8Array) => number;

/** A PushWeightsRequest with a chunk. */
export interface ChunkFrame {
  readonly bytes: Buffer;
  /** The part of `bytes` that the weights go to. */
  readonly data: Buffer;
  /** Adds the checksum of `data`, which must be complete. */
  seal(): void;
}

/** A frame with room for `sizeBytes` of data at `offset`; without a checksum if there is no way to compute it. */
export function chunkFrame(offset: number, sizeBytes: number, checksum: Checksum | undefined): ChunkFrame {
  const inner = [...(offset > 0 ? [CHUNK_OFFSET, ...varint(offset)] : []), CHUNK_DATA, ...varint(sizeBytes)];
  const tailBytes = checksum === undefined ? 0 : CHECKSUM_BYTES;
  const head = [FRAME_CHUNK, ...varint(inner.length + sizeBytes + tailBytes), ...inner];
  const bytes = Buffer.allocUnsafeSlow(head.length + sizeBytes + tailBytes);
  bytes.set(head);
  const dataEnd = head.length + sizeBytes;
  const data = bytes.subarray(head.length, dataEnd);
  return {
    bytes,
    data,
    seal() {
      if (checksum === undefined) return;
      bytes[dataEnd] = CHUNK_CRC32C;
      bytes.writeUInt32LE(checksum(data), dataEnd + 1);
    },
  };
}

function varint(value: number): number[] {
  const bytes: number[] = [];
  for (let rest = value; ; rest = Math.floor(rest / 0x80)) {
    if (rest < 0x80) return [...bytes, rest];
    bytes.push((rest % 0x80) | 0x80);
  }
}
