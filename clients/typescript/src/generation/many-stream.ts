/** Many requests over one GenerateMany call, which begin and end at any time. */

import { randomUUID } from "node:crypto";
import { type GenserveError, InvalidFieldError, StreamOverError } from "../errors.js";
import type { Connection, DuplexCall } from "../transport/connection.js";
import { checkText } from "../transport/options.js";
import { errorOfStatus } from "../transport/status.js";
import {
  GenerateManyForm,
  type GenerateManyItem,
  type GenerateManyRequest,
  type GenerateManyResponse,
  GenerateResponse,
} from "../wire/genserve/v1/generation.js";
import type { GenerateOptions, Prompt } from "./options.js";
import { generateRequest } from "./request.js";
import { type Delta, deltaOf } from "./results.js";

/** What one request gained, or the error that ended it. Nothing follows an item that `isLast`. */
export type ManyItem =
  | { requestId: string; delta: Delta; error: undefined; isLast: boolean }
  | { requestId: string; delta: undefined; error: GenserveError; isLast: true };

/** Options of a request of a stream, whose deadline and signal are those of the stream. */
export type SubmitOptions = Omit<GenerateOptions, "timeoutMs" | "signal">;

/** Ends requests by another call. */
type Abort = (requestIds: readonly string[]) => Promise<unknown>;

/**
 * One call with many requests. Iterate while you submit, or submit everything first. An error of a request is an item;
 * the loop throws only what ends the whole stream. Leaving the loop, or the block of `using`, ends the requests in the
 * daemon.
 */
export class ManyStream implements AsyncIterable<ManyItem>, Disposable {
  readonly #connection: Connection;
  readonly #call: DuplexCall<GenerateManyRequest, GenerateManyResponse>;
  readonly #abort: Abort;
  readonly #items: AsyncGenerator<ManyItem, void, undefined>;
  readonly #running = new Set<string>();
  readonly #prefix = randomUUID();
  #numSubmitted = 0;
  #takesMore = true;
  #isCancelled = false;

  /** @internal */
  constructor(connection: Connection, call: DuplexCall<GenerateManyRequest, GenerateManyResponse>, abort: Abort) {
    this.#connection = connection;
    this.#call = call;
    this.#abort = abort;
    this.#items = this.#read();
  }

  /**
   * Begins a request and returns its id, which is minted when none is given. Returns when the connection takes the
   * request, so that a program which awaits this is no faster than the daemon. Throws InvalidFieldError for an option,
   * StreamOverError after `done`, and what ended the stream.
   */
  async submit(prompt: Prompt, options: SubmitOptions = {}): Promise<string> {
    const { requestId = `${this.#prefix}-${this.#numSubmitted}` } = options;
    const message = generateRequest(prompt, { ...options, requestId });
    for (const name of ["timeoutMs", "signal"] as const) {
      if (name in options) throw InvalidFieldError.of(name, "is an option of the stream");
    }
    if (this.#running.has(requestId)) {
      throw InvalidFieldError.of("requestId", `${JSON.stringify(requestId)} is running in this stream already`);
    }
    if (!this.#takesMore) throw new StreamOverError();
    this.#numSubmitted++;
    this.#running.add(requestId);
    await this.#call.write({ action: { $case: "generate", value: message }, form: GenerateManyForm.ITEMS });
    return requestId;
  }

  /** Ends a request, which finishes as "aborted" and keeps its tokens. Does nothing if it has ended meanwhile. */
  async abort(requestId: string): Promise<void> {
    if (!this.#running.has(checkText(requestId, "requestId"))) return;
    if (!this.#takesMore) await this.#abort([requestId]);
    else await this.#call.write({ action: { $case: "abort", value: requestId }, form: GenerateManyForm.ITEMS });
  }

  /** Says that nothing more will be submitted: the stream ends with its last request. */
  done(): void {
    this.#takesMore = false;
    this.#call.call.end();
  }

  /** Ends the stream, its loop, and its requests in the daemon. */
  cancel(): void {
    this.#isCancelled = true;
    this.#takesMore = false;
    this.#call.call.cancel();
  }

  [Symbol.asyncIterator](): AsyncIterator<ManyItem, void, undefined> {
    return this.#items;
  }

  [Symbol.dispose](): void {
    this.cancel();
  }

  async *#read(): AsyncGenerator<ManyItem, void, undefined> {
    let hasFailed = false;
    try {
      for await (const { items } of this.#call.responses) {
        for (const each of items) {
          const item = this.#itemOf(each);
          if (item.isLast) this.#running.delete(item.requestId);
          yield item;
        }
      }
    } catch (error) {
      if (this.#isCancelled) return;
      hasFailed = true; // which `submit` throws, too
      throw error;
    } finally {
      if (!hasFailed) this.cancel();
    }
  }

  #itemOf({ requestId, result }: GenerateManyItem): ManyItem {
    if (result?.$case === "error") {
      const error = errorOfStatus(result.value, this.#connection.address);
      return { requestId, delta: undefined, error, isLast: true };
    }
    const delta = deltaOf(result?.value ?? GenerateResponse.create(), requestId);
    return { requestId, delta, error: undefined, isLast: delta.usage !== undefined };
  }
}
