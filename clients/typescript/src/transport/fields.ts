/** JavaScript's numbers as the wire's, checked: an error names the field. */

import { InvalidFieldError } from "../errors.js";
import type { Duration } from "../wire/google/protobuf/duration.js";

/** The largest values of the types of whole numbers. */
const RANGES = {
  int32: [-(2 ** 31), 2 ** 31 - 1],
  uint32: [0, 2 ** 32 - 1],
} as const;

const MAX_FLOAT = 3.4028234663852886e38; // of 32 bits
const MAX_DURATION_MS = 315_576_000_000_000; // of protobuf's Duration: 10,000 years
const MAX_WAIT_MS = 31_622_400_000; // that a daemon accepts: 366 days

/** Kinds of numbers on the wire. */
export type NumberKind = "float" | keyof typeof RANGES;

/** The value, if it is a number of this kind. */
export function checkNumber(value: unknown, kind: NumberKind, field: string): number {
  if (typeof value !== "number" || !isOfKind(value, kind)) {
    throw InvalidFieldError.of(field, `${shown(value)} is not of type ${kind}`);
  }
  return value;
}

function isOfKind(value: number, kind: NumberKind): boolean {
  if (kind === "float") return !Number.isFinite(value) || Math.abs(value) <= MAX_FLOAT;
  const [least, most] = RANGES[kind];
  return Number.isInteger(value) && value >= least && value <= most;
}

/** The value, if it is a whole number above 0. */
export function checkCount(value: unknown, field: string): number {
  const count = checkNumber(value, "int32", field);
  if (count < 1) throw InvalidFieldError.of(field, `${count} is not above 0`);
  return count;
}

/** Whether a value has properties by their names, as no list has. */
export function isObject(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Milliseconds as protobuf's Duration. */
export function durationOf(milliseconds: number, field: string): Duration {
  if (typeof milliseconds !== "number" || !(Math.abs(milliseconds) <= MAX_DURATION_MS)) {
    throw InvalidFieldError.of(field, `${shown(milliseconds)} is not a number of milliseconds`);
  }
  const seconds = Math.trunc(milliseconds / 1000);
  return { seconds: BigInt(seconds), nanos: Math.trunc((milliseconds - seconds * 1000) * 1e6) };
}

/** The same; undefined stays undefined. */
export function optionalDuration(milliseconds: number | undefined, field: string): Duration | undefined {
  return milliseconds === undefined ? undefined : durationOf(milliseconds, field);
}

/** How long the daemon may wait, for a pause, say; its longest wait stands for no limit. */
export function waitOf(timeoutMs: number): Duration {
  return durationOf(timeoutMs > MAX_WAIT_MS ? MAX_WAIT_MS : timeoutMs, "timeoutMs");
}

/** Protobuf's Duration in milliseconds. */
export function millisecondsOf(duration: Duration): number {
  return Number(duration.seconds) * 1000 + duration.nanos / 1e6;
}

/** A 64-bit number of the wire. Throws RangeError for one that a number cannot hold exactly: above 9 PB. */
export function exactNumber(value: bigint, field: string): number {
  if (value > BigInt(Number.MAX_SAFE_INTEGER) || value < BigInt(Number.MIN_SAFE_INTEGER)) {
    throw new RangeError(`${field} is ${value}, which no number holds exactly`);
  }
  return Number(value);
}

/** A value as a message shows it. */
export function shown(value: unknown): string {
  if (typeof value === "string") return JSON.stringify(value.slice(0, 40));
  return typeof value === "object" && value !== null ? "an object" : String(value);
}
