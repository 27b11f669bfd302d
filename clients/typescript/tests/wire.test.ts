import { crc32c } from "@node-rs/crc32";
import { PushWeightsRequest } from "genserve/v1";
import { describe, expect, test } from "vitest";
import { durationOf, exactNumber, millisecondsOf } from "../src/transport/fields.js";
import { wordOf } from "../src/transport/words.js";
import { Phase } from "../src/wire/genserve/v1/types.js";
import { ByteSpace } from "../src/weights/byte-space.js";
import { ChunkFrame, ChunkFrames } from "../src/weights/chunk-frame.js";
import { memorySources, type Tensor } from "../src/weights/sources.js";

describe("a chunk frame", () => {
  test.each([0, 1, 127, 128, 2 ** 31, 2 ** 40 + 5, Number.MAX_SAFE_INTEGER])(
    "at offset %d is what protobuf reads",
    (offset) => {
      const frame = new ChunkFrame(300, crc32c);
      frame.begin(offset, 300).fill(7);
      const bytes = frame.seal();
      const message = PushWeightsRequest.decode(bytes);
      expect(message.frame).toMatchObject({ $case: "chunk", value: { offset: BigInt(offset) } });
      const encoded = Buffer.from(PushWeightsRequest.encode(message).finish());
      expect(encoded.equals(bytes)).toBe(true);
    },
  );

  test("without a checksum has none", () => {
    const frame = new ChunkFrame(2, undefined);
    frame.begin(3, 2).fill(7);
    const { frame: chunk } = PushWeightsRequest.decode(frame.seal());
    expect(chunk).toMatchObject({ $case: "chunk", value: { crc32c: undefined, data: Buffer.from([7, 7]) } });
  });

  test("that is used again holds nothing of its former chunk", () => {
    const frame = new ChunkFrame(300, crc32c);
    frame.begin(2 ** 40, 300).fill(7);
    frame.seal();
    frame.begin(0, 2).fill(8);
    const bytes = frame.seal();
    const data = Buffer.from([8, 8]);
    const chunk = { $case: "chunk", value: { offset: 0n, data, crc32c: crc32c(data) } };
    expect(PushWeightsRequest.decode(bytes).frame).toMatchObject(chunk);
  });
});

describe("the frames of a stream", () => {
  const never = new AbortController().signal;

  test("are no more than allowed, and one that is released is taken again", async () => {
    const frames = new ChunkFrames(2, 8, crc32c);
    const [first, second] = [await frames.take(never), await frames.take(never)];
    expect(second).not.toBe(first);
    const waiting = frames.take(never);
    frames.release(second);
    expect(await waiting).toBe(second);
    frames.release(first);
    expect(await frames.take(never)).toBe(first);
  });

  test("are waited for no longer than the stream runs", async () => {
    const frames = new ChunkFrames(1, 8, crc32c);
    await frames.take(never);
    const ended = new AbortController();
    const waiting = frames.take(ended.signal);
    ended.abort();
    await expect(waiting).rejects.toMatchObject({ name: "AbortError" });
    await expect(frames.take(ended.signal)).rejects.toMatchObject({ name: "AbortError" });
  });
});

test("the checksum is CRC32C, as in RFC 3720", () => {
  expect(crc32c(Buffer.alloc(32))).toBe(0x8a9136aa);
  expect(crc32c(Buffer.from("123456789"))).toBe(0xe3069283);
});

describe("a byte space", () => {
  const u8 = (...bytes: number[]): Tensor => ({ dtype: "U8", shape: [bytes.length], data: Uint8Array.from(bytes) });

  test("has tensors in the order of their names' code points", () => {
    const names = ["\u{10000}", "\uffff", "b", "a.b", "a"];
    const space = new ByteSpace(memorySources(Object.fromEntries(names.map((name) => [name, u8(1)]))));
    const { tensors } = space.manifest(false);
    expect(tensors.map(({ name }) => name)).toEqual(["a", "a.b", "b", "\uffff", "\u{10000}"]);
    expect(tensors.map(({ offset }) => offset)).toEqual([0n, 1n, 2n, 3n, 4n]);
  });

  test("reads over the borders of tensors, also of empty ones", async () => {
    const space = new ByteSpace(memorySources({ a: u8(1, 2), b: u8(), c: u8(3), d: u8(4, 5, 6) }));
    const target = new Uint8Array(4);
    await space.read(target, 1);
    expect([...target]).toEqual([2, 3, 4, 5]);
  });

  test("has the digest that the daemon computes", () => {
    const tensors: Record<string, Tensor> = {
      w: { dtype: "BF16", shape: [2, 3], data: new Uint8Array(12) },
      b: { dtype: "F32", shape: [], data: new Uint8Array(4) },
    };
    // As genserve.tensors.manifest.Manifest.end_to_end(...).digest says.
    const digest = "c0e2e41b6a785cdac329640989a8d76e7e57412a5e98e1049d4b21efb6fffc3d";
    expect(new ByteSpace(memorySources(tensors)).manifestDigest).toBe(digest);
  });
});

test.each([0, 1, 999.5, 60_000, -1500, 1e12])("a duration of %d ms is the same on the way back", (milliseconds) => {
  expect(millisecondsOf(durationOf(milliseconds, "x"))).toBe(milliseconds);
});

test("a 64-bit number that no number holds is refused", () => {
  expect(exactNumber(2n ** 53n - 1n, "x")).toBe(Number.MAX_SAFE_INTEGER);
  expect(() => exactNumber(2n ** 53n, "totalBytes")).toThrow("totalBytes is 9007199254740992");
});

test("a value of a newer daemon has a word, too", () => {
  expect(wordOf(Phase, 2)).toBe("running");
  expect(wordOf(Phase, 99)).toBe("unknown_99");
});
