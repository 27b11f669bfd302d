/** Holds a pause: takes a lease, renews it in the background, and ends it however the work ends. */

import { DeadlineError, detailsOf, InvalidFieldError, PauseLeaseLostError, UnavailableError } from "../errors.js";
import { pause } from "../transport/pause.js";
import type { ControlCalls, PauseOptions } from "./calls.js";
import type { PauseLease } from "./state.js";

const DEFAULT_TTL_MS = 60_000;

/** A lease that is renewed in the background until its work ends. */
export interface HeldPause extends PauseLease {
  /** Aborted when the lease is lost, with the PauseLeaseLostError: the engine may already run. */
  readonly signal: AbortSignal;
}

/** Runs `work` while generation is paused. */
export async function holdPause<Result>(
  calls: ControlCalls,
  options: PauseOptions,
  work: (lease: HeldPause) => Promise<Result> | Result,
): Promise<Result> {
  if (typeof work !== "function") throw InvalidFieldError.of("work", "must be a function");
  const ttlMs = options.ttlMs ?? DEFAULT_TTL_MS;
  const { lease } = await calls.pause({ ...options, ttlMs });
  const renewal = new Renewal(calls, lease.leaseId, ttlMs);
  let result: Result;
  try {
    result = await work({ ...lease, signal: renewal.lost });
  } catch (error) {
    try {
      await renewal.end();
    } catch (failure) {
      // Other failures are not told: the lease ends by itself, and what the work says matters more.
      if (failure instanceof PauseLeaseLostError) {
        throw new PauseLeaseLostError(failure.message, { ...detailsOf(failure), cause: error });
      }
    }
    throw error;
  }
  await renewal.end();
  return result;
}

/** Renews a lease every third of its time to live, so that two failures are tolerated. */
class Renewal {
  readonly #calls: ControlCalls;
  readonly #leaseId: string;
  readonly #ttlMs: number;
  readonly #ending = new AbortController();
  readonly #lost = new AbortController();
  readonly #renewing: Promise<void>;

  constructor(calls: ControlCalls, leaseId: string, ttlMs: number) {
    this.#calls = calls;
    this.#leaseId = leaseId;
    this.#ttlMs = ttlMs;
    this.#renewing = this.#run().catch((error: unknown) => {
      if (!this.#ending.signal.aborted) this.#lost.abort(error);
    });
  }

  get lost(): AbortSignal {
    return this.#lost.signal;
  }

  /** Ends the renewal and the pause. Throws what ended the renewal, or PauseLeaseLostError if the lease was lost. */
  async end(): Promise<void> {
    this.#ending.abort();
    await this.#renewing;
    let isExpired = false;
    try {
      isExpired = (await this.#calls.resume(this.#leaseId, {})).leaseExpired;
    } catch (error) {
      if (!this.lost.aborted) throw error;
    }
    this.lost.throwIfAborted();
    if (isExpired) {
      throw new PauseLeaseLostError(
        `lease ${this.#leaseId} had expired before the work ended; the engine may have run`,
      );
    }
  }

  async #run(): Promise<never> {
    const { signal } = this.#ending;
    let endsAt = performance.now() + this.#ttlMs;
    // Nothing takes longer than the lease has: its holder is told when it ends, not when a renewal gives up.
    const stepMs = () => Math.min(this.#ttlMs / 3, endsAt - performance.now());
    for (;;) {
      await pause(Math.max(stepMs(), 0), signal);
      const askedAt = performance.now();
      try {
        await this.#calls.renewPause(this.#leaseId, { ttlMs: this.#ttlMs, timeoutMs: stepMs(), signal });
        endsAt = askedAt + this.#ttlMs;
      } catch (error) {
        const mayPass = error instanceof UnavailableError || error instanceof DeadlineError;
        if (!mayPass) throw error;
        if (performance.now() >= endsAt) {
          throw new PauseLeaseLostError(`lease ${this.#leaseId} could not be renewed in time`, { cause: error });
        }
      }
    }
  }
}
