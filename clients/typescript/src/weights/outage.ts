/** How long a push or a pull that is interrupted is tried again: a budget in time, which progress fills up again. */

import { DeadlineError, detailsOf, type GenserveError, PushTruncatedError, UnavailableError } from "../errors.js";
import { pause } from "../transport/pause.js";

const BUDGET_MS = 30_000;
const FIRST_PAUSE_MS = 200;
const MAX_PAUSE_MS = 3_200;

/** Whether a transfer that failed like this can go on with what is missing. */
export function isInterruption(error: unknown): error is GenserveError {
  return error instanceof UnavailableError || error instanceof PushTruncatedError;
}

/** A transfer, as errors name it. */
export interface Transfer {
  /** Such as `push "a"`. */
  readonly name: string;
  /** What else is true of one whose deadline has passed. */
  readonly ifLate: string;
  /** Of its errors. */
  readonly metadata: Readonly<Record<string, string>>;
}

/** The outage of one transfer: from a failure until bytes move again. */
export class Outage {
  readonly #transfer: Transfer;
  readonly #deadline: number;
  readonly #signal: AbortSignal | undefined;
  #first: GenserveError | undefined;
  #beganAt = 0;
  #pauseMs = 0;

  /** `deadline` and `signal` are those of the whole transfer. */
  constructor(transfer: Transfer, deadline: number, signal: AbortSignal | undefined) {
    this.#transfer = transfer;
    this.#deadline = deadline;
    this.#signal = signal;
  }

  /** The end of the budget, or of the transfer. */
  get endsAt(): number {
    return Math.min(this.#deadline, (this.#first === undefined ? Date.now() : this.#beganAt) + BUDGET_MS);
  }

  /** Returns when the next attempt is due; the first one is at once. Throws if there is no time for it. */
  async untilNextAttempt(error: GenserveError): Promise<void> {
    if (this.#first === undefined) {
      this.#first = error;
      this.#beganAt = Date.now();
    }
    const leftMs = this.endsAt - Date.now();
    if (leftMs < FIRST_PAUSE_MS) throw this.#gaveUp(error);
    await pause(Math.min(this.#pauseMs, leftMs / 2), this.#signal); // so that no attempt is far from the end
    this.#pauseMs = Math.min(Math.max(2 * this.#pauseMs, FIRST_PAUSE_MS), MAX_PAUSE_MS);
  }

  /** Bytes have moved. */
  over(): void {
    this.#first = undefined;
    this.#pauseMs = 0;
  }

  /** A stream has ended after so long. One that outlasted every pause had a connection, even if no bytes moved. */
  streamed(milliseconds: number): void {
    if (milliseconds > MAX_PAUSE_MS) this.over();
  }

  /** The error of a transfer whose deadline has passed. */
  late(cause: GenserveError, why = ""): DeadlineError {
    const { name, ifLate, metadata } = this.#transfer;
    return new DeadlineError(`${name} did not end in time${ifLate}${why}`, { code: cause.code, metadata, cause });
  }

  #gaveUp(last: GenserveError): GenserveError {
    const waited = `waited ${Math.round((Date.now() - this.#beganAt) / 1000)} s to resume`;
    if (this.endsAt === this.#deadline) return this.late(last, ` (${waited} it: ${last.message})`);
    const { name, metadata } = this.#transfer;
    const errorClass = last instanceof PushTruncatedError ? PushTruncatedError : UnavailableError;
    const details = { ...detailsOf(last), metadata: { ...last.metadata, ...metadata }, cause: this.#first };
    return new errorClass(`${waited} ${name}: ${last.message}`, details);
  }
}
