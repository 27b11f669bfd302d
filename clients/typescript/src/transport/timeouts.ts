import { InvalidFieldError } from "../errors.js";
import { DEFAULT_TIMEOUTS_MS } from "../wire/service_config.js";

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

/** When a call that begins now is over. */
export function deadlineOf(timeoutMs: number): number {
  if (typeof timeoutMs !== "number" || Number.isNaN(timeoutMs)) {
    throw InvalidFieldError.of("timeoutMs", `${timeoutMs} is not a number of milliseconds`);
  }
  return Date.now() + timeoutMs;
}
