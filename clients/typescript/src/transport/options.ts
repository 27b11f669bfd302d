/** Options and arguments of calls, checked: an error names the option. TypeScript's types do not reach JavaScript. */

import { InvalidFieldError } from "../errors.js";
import { checkNumber, isObject, type NumberKind, shown } from "./fields.js";
import type { CallOptions } from "./timeouts.js";

/** What an option holds; "document": JSON as an object or as text; "texts": one or several. */
export type Kind = NumberKind | keyof typeof CHECKS;

/** The kinds of all options that a call has. */
export type Kinds<Options> = Readonly<Record<keyof Options & string, Kind>>;

const MAX_DEPTH = 64; // of JSON; protobuf's messages end at 100

type Check = (value: unknown, name: string) => void;

const elsewhere: Check = () => undefined;

const CHECKS = {
  boolean: typeCheck("boolean"),
  string: typeCheck("string"),
  function: typeCheck("function"),
  functions: (value, name) => {
    if (!list(value, name).every((each) => typeof each === "function")) {
      throw InvalidFieldError.of(name, "must be a list of functions");
    }
  },
  words: elsewhere, // where they become values of an enum
  milliseconds: elsewhere, // where they become a duration or a deadline
  json: (value, name) => {
    checkJson(checkObject(value, name), name, MAX_DEPTH);
  },
  document: (value, name) => {
    if (typeof value !== "string") checkObject(value, name);
  },
  object: (value, name) => {
    checkObject(value, name);
  },
  pem: (value, name) => {
    if (typeof value !== "string" && !(value instanceof Uint8Array)) {
      throw InvalidFieldError.of(name, "must be a string or a Uint8Array");
    }
  },
  strings: (value, name) => {
    checkTexts(value, name);
  },
  texts: (value, name) => {
    if (typeof value !== "string") checkTexts(value, name);
  },
  numbers: (value, name) => {
    for (const each of list(value, name)) checkNumber(each, "int32", name);
  },
  biases: (value, name) => {
    for (const [token, bias] of Object.entries(checkObject(value, name))) {
      checkNumber(Number(token), "int32", name);
      checkNumber(bias, "float", name);
    }
  },
  seed: (value, name) => {
    if (typeof value !== "bigint" && !Number.isSafeInteger(value)) {
      throw InvalidFieldError.of(name, "must be a bigint or a whole number that is exact");
    }
    if (BigInt.asIntN(64, BigInt(value as number)) !== BigInt(value as number)) {
      throw InvalidFieldError.of(name, "must fit into 64 bits");
    }
  },
  signal: (value, name) => {
    if (typeof value !== "object" || value === null || !("throwIfAborted" in value)) {
      throw InvalidFieldError.of(name, "must be an AbortSignal");
    }
  },
} as const satisfies Record<string, Check>;

/** The options that every call has. */
export const CALL: Kinds<CallOptions> = { timeoutMs: "milliseconds", signal: "signal" };

/** Refuses an option that nothing is known about, such as one with a typing error, and one of another kind. */
export function checkOptions<Options extends object>(options: Options, kinds: Kinds<Options>, place = ""): void {
  for (const [name, value] of Object.entries(checkObject(options, place || "options"))) {
    const field = place === "" ? name : `${place}.${name}`;
    const kind = Object.hasOwn(kinds, name) ? kinds[name as keyof Options & string] : undefined;
    if (kind === undefined) throw InvalidFieldError.of(field, "is not an option");
    if (value === undefined) continue;
    if (kind in CHECKS) CHECKS[kind as keyof typeof CHECKS](value, field);
    else checkNumber(value, kind as NumberKind, field);
  }
}

/** An argument that must be text. */
export function checkText(value: unknown, name: string): string {
  if (typeof value !== "string") throw InvalidFieldError.of(name, `${shown(value)} is not a string`);
  return value;
}

/** An argument that must be a list of texts: one text would be a list of its letters. */
export function checkTexts(value: unknown, name: string): readonly string[] {
  const texts = list(value, name);
  if (!texts.every((each) => typeof each === "string")) {
    throw InvalidFieldError.of(name, "must be a list of strings");
  }
  return texts;
}

/** An argument that must be a list of token ids. */
export function checkTokenIds(value: unknown, name: string): readonly number[] {
  return list(value, name).map((each) => checkNumber(each, "uint32", name));
}

function checkObject(value: unknown, name: string): object {
  if (!isObject(value)) throw InvalidFieldError.of(name, "must be an object");
  return value;
}

function checkJson(value: unknown, name: string, depth: number): void {
  if (value === null || ["boolean", "string", "number"].includes(typeof value)) return;
  const isPlain = Array.isArray(value) || (typeof value === "object" && isPlainObject(value));
  if (!isPlain || depth === 0) throw InvalidFieldError.of(name, "must be JSON");
  for (const each of Object.values(value as object)) {
    if (each !== undefined) checkJson(each, name, depth - 1);
  }
}

function isPlainObject(value: object): boolean {
  const prototype: unknown = Object.getPrototypeOf(value);
  return prototype === null || Object.getPrototypeOf(prototype) === null;
}

function list(value: unknown, name: string): readonly unknown[] {
  if (!Array.isArray(value)) throw InvalidFieldError.of(name, "must be a list");
  return value as readonly unknown[];
}

function typeCheck(type: "boolean" | "string" | "function"): Check {
  return (value, name) => {
    if (typeof value !== type) throw InvalidFieldError.of(name, `must be a ${type}`);
  };
}
