/** Bytes [start, end). */
export type ByteRange = readonly [start: number, end: number];

/** How many bytes ranges without overlaps have together. */
export function numBytes(ranges: readonly ByteRange[]): number {
  return ranges.reduce((sum, [start, end]) => sum + end - start, 0);
}
