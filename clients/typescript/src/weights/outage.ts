/** Whether a push or a pull that is interrupted is tried again, and when: docs/protocol.md of the project has the rules. */

import { DeadlineError, detailsOf, type GenserveError, PushTruncatedError, UnavailableError } from "../errors.js";
import { pause } from "../transport/pause.js";

/** One attempt may take minutes, and refused connections fail within milliseconds: neither is enough by itself. */
const MIN_RESUMES = 5;
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
  #numInVain = 0;

  /** `deadline` and `signal` are those of the whole transfer. */
  constructor(transfer: Transfer, deadline: number, signal: AbortSignal | undefined) {
    this.#transfer = transfer;
    this.#deadline = deadline;
    this.#signal = signal;
  }

  /** Returns when the next attempt is due. Throws if the transfer is given up. */
  async untilNextAttempt(error: GenserveError): Promise<void> {
    this.#begin(error);
    if (this.#numInVain >= MIN_RESUMES && Date.now() - this.#beganAt >= BUDGET_MS) throw this.#gaveUp(error);
    await this.#pause(this.#numInVain++, error);
  }

  /** What `ask` returns of the daemon. It is asked again for as long as it has no connection: for half a minute. */
  async answerTo<Answer>(error: GenserveError, ask: (timeoutMs: number) => Promise<Answer>): Promise<Answer> {
    this.#begin(error);
    const endsAt = Math.min(this.#deadline, Date.now() + BUDGET_MS);
    for (let numInVain = 0; ; numInVain++) {
      try {
        return await ask(endsAt - Date.now());
      } catch (failure) {
        const mayAnswer = failure instanceof UnavailableError && Date.now() + pauseMsAfter(numInVain) < endsAt;
        if (!mayAnswer && (failure instanceof UnavailableError || failure instanceof DeadlineError)) {
          throw this.#gaveUp(error);
        }
        if (!mayAnswer) throw failure;
        await this.#pause(numInVain, error);
      }
    }
  }

  /** Bytes have moved. */
  over(): void {
    this.#first = undefined;
    this.#numInVain = 0;
  }

  /** The error of a transfer whose deadline has passed. */
  late(cause: GenserveError, why = ""): DeadlineError {
    const { name, ifLate, metadata } = this.#transfer;
    return new DeadlineError(`${name} did not end in time${ifLate}${why}`, { code: cause.code, metadata, cause });
  }

  #begin(error: GenserveError): void {
    if (this.#first !== undefined) return;
    this.#first = error;
    this.#beganAt = Date.now();
  }

  async #pause(numInVain: number, error: GenserveError): Promise<void> {
    const leftMs = this.#deadline - Date.now();
    if (leftMs < FIRST_PAUSE_MS) throw this.#gaveUp(error);
    await pause(Math.min(pauseMsAfter(numInVain), leftMs / 2), this.#signal); // no attempt is far from the deadline
  }

  #gaveUp(last: GenserveError): GenserveError {
    const waited = `waited ${Math.round((Date.now() - this.#beganAt) / 1000)} s to resume`;
    if (this.#deadline - Date.now() < FIRST_PAUSE_MS) return this.late(last, ` (${waited} it: ${last.message})`);
    const { name, metadata } = this.#transfer;
    const errorClass = last instanceof PushTruncatedError ? PushTruncatedError : UnavailableError;
    const details = { ...detailsOf(last), metadata: { ...last.metadata, ...metadata }, cause: this.#first };
    return new errorClass(`${waited} ${name}: ${last.message}`, details);
  }
}

function pauseMsAfter(numInVain: number): number {
  return Math.min(FIRST_PAUSE_MS * 2 ** numInVain, MAX_PAUSE_MS);
}
