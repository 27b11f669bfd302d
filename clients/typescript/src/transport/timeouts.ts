import { InvalidFieldError } from "../errors.js";
import { DEFAULT_TIMEOUTS_MS } from "../wire/service_config.js";
import { shown } from "./fields.js";

/** Limits, in milliseconds, of calls that are given no `timeoutMs`. `Infinity` = no limit. */
export interface Timeouts {
  /** All calls except those below; default 30 s. */
  controlMs: number;
  /** From the call to the last token; default 10 min. */
  generateMs: number;
  /** A push of weights: all bytes, retries and applying together; default 10 min. */
  pushMs: number;
  /** Time that a pause gets on top of its `timeoutMs`; default 10 s. */
  pauseSlackMs: number;
}

/** Those of them that are given. */
export type GivenTimeouts = { readonly [Name in keyof Timeouts]?: number | undefined };

export const DEFAULT_TIMEOUTS: Readonly<Timeouts> = {
  controlMs: DEFAULT_TIMEOUTS_MS["genserve.v1.ControlService"],
  generateMs: DEFAULT_TIMEOUTS_MS["genserve.v1.GenerationService/Generate"],
  pushMs: DEFAULT_TIMEOUTS_MS["genserve.v1.WeightService/PushWeights"],
  pauseSlackMs: 10_000,
};

/** How long a call may take, and what ends it before. */
export interface CallOptions {
  /** Limit of the call; `Infinity` = none. Default: as in the client's `timeouts`. */
  timeoutMs?: number | undefined;
  /** Ends the call, in the daemon too, which then throws the signal's reason. */
  signal?: AbortSignal | undefined;
}

/** The options of a call whose default limit is this one. */
export function limited({ timeoutMs, signal }: CallOptions, defaultMs: number): CallOptions {
  return { timeoutMs: timeoutMs ?? defaultMs, signal };
}

/** More than gRPC can send; no limit is one, too. */
const FOREVER_MS = 1e14;

/** The limits that are given, and the defaults of the others. Throws InvalidFieldError. */
export function timeoutsOf(given: GivenTimeouts): Timeouts {
  const timeouts: Timeouts = { ...DEFAULT_TIMEOUTS };
  for (const [name, value] of Object.entries(given) as [keyof Timeouts, unknown][]) {
    if (!Object.hasOwn(DEFAULT_TIMEOUTS, name))
      throw InvalidFieldError.of(`timeouts.${name}`, "is not a limit of a client");
    if (value !== undefined) timeouts[name] = checkTimeout(value, `timeouts.${name}`);
  }
  return timeouts;
}

/** When a call that begins now is over. Throws InvalidFieldError. */
export function deadlineOf(timeoutMs: number): number {
  return checkTimeout(timeoutMs, "timeoutMs") > FOREVER_MS ? Infinity : Date.now() + timeoutMs;
}

function checkTimeout(value: unknown, name: string): number {
  if (typeof value !== "number" || Number.isNaN(value)) {
    throw InvalidFieldError.of(name, `${shown(value)} is not a number of milliseconds`);
  }
  return value;
}
