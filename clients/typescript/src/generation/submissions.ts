/**
 * Sends the requests of a stream, but no more at once than the daemon accepts.
 *
 * After a refusal, the limit of running requests is the number that were not refused: one that ends makes room for one.
 * Because others may have made room too, the limit doubles after each delay without a refusal.
 */

import type { ClientDuplexStream } from "@grpc/grpc-js";
import { GenerateManyForm, type GenerateManyRequest, type GenerateRequest } from "../wire/genserve/v1/generation.js";

/** Half of the default limit of a daemon for all its clients, and more than an engine runs at once. */
const MAX_IN_FLIGHT = 4096;
const RETRY_AFTER_MS = 500; // if the daemon gives no delay

export class Submissions {
  readonly #call: ClientDuplexStream<GenerateManyRequest, unknown>;
  readonly #waiting: GenerateRequest[];
  readonly #inFlight = new Map<string, GenerateRequest>();
  #limit = MAX_IN_FLIGHT;
  #isHeld = false;
  #timer: NodeJS.Timeout | undefined;
  #isOver = false;

  constructor(call: ClientDuplexStream<GenerateManyRequest, unknown>, requests: readonly GenerateRequest[]) {
    this.#call = call;
    this.#waiting = [...requests].reverse();
    call.on("drain", () => {
      this.#send();
    });
    this.#send();
  }

  /** The daemon's queue was full. The request is sent first when there is room. */
  refused(requestId: string, retryAfterMs = RETRY_AFTER_MS): void {
    const request = this.#inFlight.get(requestId);
    if (request === undefined) return;
    this.#inFlight.delete(requestId);
    this.#waiting.push(request);
    this.#limit = Math.max(this.#inFlight.size, 1);
    this.#isHeld = true;
    this.#relaxAfter(retryAfterMs);
  }

  /** A request has ended, which makes room for another one. */
  ended(requestId: string): void {
    this.#inFlight.delete(requestId);
    this.#isHeld = false;
    this.#send();
  }

  /** Nothing is sent any more. */
  stop(): void {
    this.#isOver = true;
    clearTimeout(this.#timer);
  }

  #relaxAfter(delayMs: number): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#limit = Math.min(2 * this.#limit, MAX_IN_FLIGHT);
      this.#isHeld = false;
      if (this.#waiting.length > 0 && this.#limit < MAX_IN_FLIGHT) this.#relaxAfter(delayMs);
      this.#send();
    }, delayMs);
  }

  #send(): void {
    if (this.#isOver) return;
    while (!this.#isHeld && !this.#call.writableNeedDrain && this.#inFlight.size < this.#limit) {
      const generate = this.#waiting.pop();
      if (generate === undefined) break;
      this.#inFlight.set(generate.requestId, generate);
      this.#call.write({ action: { $case: "generate", value: generate }, form: GenerateManyForm.ITEMS });
    }
    if (this.#waiting.length === 0 && this.#inFlight.size === 0) {
      this.stop();
      this.#call.end();
    }
  }
}
