/** The golden vectors of clients/conformance, which hold for clients in all languages. */

import { readFileSync } from "node:fs";
import { Generation, GenserveError } from "genserve";
import { GenerateResponse, PushWeightsRequest } from "genserve/v1";
import { expect, test } from "vitest";
import { deltaOf } from "../src/generation/results.js";
import { errorOfStatus } from "../src/transport/status.js";
import { ByteSpace } from "../src/weights/byte-space.js";
import { loadChecksum } from "../src/weights/checksum.js";
import { ChunkFrame } from "../src/weights/chunk-frame.js";
import { memorySources, type Tensor } from "../src/weights/sources.js";
import { Status } from "../src/wire/google/rpc/status.js";

function vectors<Vector>(name: string): Vector[] {
  return JSON.parse(readFileSync(new URL(`../../conformance/vectors/${name}`, import.meta.url), "utf8")) as Vector[];
}

/** Byte i is i * step, modulo 251. */
function pattern(numBytes: number, step = 7): Buffer {
  return Buffer.from(Array.from({ length: numBytes }, (_, i) => (i * step) % 251));
}

const bytesOf = (hex: string): Buffer => Buffer.from(hex, "hex");

interface ChecksumVector {
  name: string;
  hex?: string;
  pattern_bytes?: number;
  crc32c: number;
}

test.each(vectors<ChecksumVector>("crc32c.json"))("the checksum of $name", async (vector) => {
  const crc32c = (await loadChecksum())!;
  const data = vector.hex === undefined ? pattern(vector.pattern_bytes ?? 0) : bytesOf(vector.hex);
  expect(crc32c(data)).toBe(vector.crc32c);
});

interface FrameVector {
  offset?: number;
  pattern_bytes?: number;
  hex?: string;
  checksum?: boolean;
  end?: boolean;
  frame_hex: string;
}

test.each(vectors<FrameVector>("frames.json"))("the frame $frame_hex", async (vector) => {
  if (vector.end === true) {
    const end = PushWeightsRequest.encode({ frame: { $case: "end", value: {} } }).finish();
    expect(Buffer.from(end).toString("hex")).toBe(vector.frame_hex);
    return;
  }
  const data = vector.hex === undefined ? pattern(vector.pattern_bytes!) : bytesOf(vector.hex);
  const frame = new ChunkFrame(data.length, vector.checksum === true ? await loadChecksum() : undefined);
  frame.begin(vector.offset!, data.length).set(data);
  expect(frame.seal().toString("hex")).toBe(vector.frame_hex);
});

interface ManifestVector {
  name: string;
  tensors: { name: string; dtype: Tensor["dtype"]; shape: number[]; offset: number; length: number }[];
  total_bytes: number;
  manifest_digest: string;
}

test.each(vectors<ManifestVector>("manifests.json"))("the manifest of $name", (vector) => {
  const tensors = vector.tensors.map(({ name, dtype, shape, length }) => {
    return [name, { dtype, shape, data: new Uint8Array(length) }] as const;
  });
  const space = new ByteSpace(memorySources(Object.fromEntries(tensors.reverse())));
  expect(space.manifest(false).tensors.map(({ offset }) => Number(offset))).toEqual(
    vector.tensors.map(({ offset }) => offset),
  );
  expect([space.totalBytes, space.manifestDigest]).toEqual([vector.total_bytes, vector.manifest_digest]);
});

interface ErrorVector {
  name: string;
  status_hex: string;
  code: string;
  message: string;
  reason: string;
  violations: [string, string][];
  retry_after_ms: number | null;
  metadata: Record<string, string>;
}

test.each(vectors<ErrorVector>("errors.json"))("the error with $name", (vector) => {
  const error = errorOfStatus(Status.decode(bytesOf(vector.status_hex)), "here:1");
  expect(error).toBeInstanceOf(GenserveError);
  expect(error).toMatchObject({ reason: vector.reason, code: vector.code, metadata: vector.metadata });
  expect(error.violations.map(({ field, description }) => [field, description])).toEqual(vector.violations);
  expect(error.retryAfterMs ?? null).toBe(vector.retry_after_ms);
  expect(error.message).toContain(vector.message);
});

interface GenerationVector {
  name: string;
  responses_hex: string[];
  sequences: Record<string, unknown>[];
  prompt?: Record<string, unknown>;
}

test.each(vectors<GenerationVector>("generations.json"))("the generation: $name", (vector) => {
  const generation = new Generation();
  for (const hex of vector.responses_hex) generation.add(deltaOf(GenerateResponse.decode(bytesOf(hex)), "r"));
  const found = generation.sequences.map(({ tokenIds, text, weightSpans, finish, logprobs }) => ({
    token_ids: tokenIds,
    text,
    weight_spans: weightSpans.map(({ version, start, end, loraVersion }) =>
      loraVersion === 0 ? [version, start, end] : [version, start, end, loraVersion],
    ),
    finish: finish?.reason ?? "unspecified",
    ...(finish?.stopString === undefined ? {} : { stop_string: finish.stopString }),
    ...(finish?.stopTokenId === undefined ? {} : { stop_token_id: finish.stopTokenId }),
    ...(logprobs === undefined ? {} : { logprobs: logprobs.sampled }),
  }));
  expect(found).toEqual(vector.sequences);
  expect(generation.requestId).toBe("r");
  if (vector.prompt !== undefined) {
    const { numTokens, tokenIds, logprobs } = generation.prompt!;
    expect({ num_tokens: numTokens, token_ids: tokenIds, logprobs: logprobs?.sampled }).toEqual(vector.prompt);
  }
});
