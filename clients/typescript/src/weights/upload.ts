/** Sends one push: streams the bytes, and when the stream breaks, those that are missing. */

import {
  DeadlineError,
  detailsOf,
  GenserveError,
  PushNotFoundError,
  PushTruncatedError,
  UnavailableError,
} from "../errors.js";
import type { ClientStream, Connection } from "../transport/connection.js";
import { pause } from "../transport/pause.js";
import { deadlineOf } from "../transport/timeouts.js";
import { PushAction, type PushHeader, PushWeightsRequest, WeightServiceService } from "../wire/genserve/v1/weights.js";
import { ByteSpace } from "./byte-space.js";
import { loadChecksum } from "./checksum.js";
import { type Checksum, ChunkFrames } from "./chunk-frame.js";
import { chunkBytesOf, type SendOptions } from "./options.js";
import { type PushResult, pushResultOf } from "./push.js";
import { type ByteRange, numBytes } from "./ranges.js";
import type { TensorSource } from "./sources.js";

const MAX_RESUMES = 5;
const RECONNECT_TIMEOUT_MS = 30_000;
const FIRST_PAUSE_MS = 200;
const MAX_PAUSE_MS = 3_200;
const MAX_FRAMES_AHEAD = 4;

const END_FRAME = Buffer.from(PushWeightsRequest.encode({ frame: { $case: "end", value: {} } }).finish());

/** Sends tensors under a header, whose manifest is added here. */
export function upload(
  connection: Connection,
  header: PushHeader,
  sources: readonly TensorSource[],
  options: SendOptions & { partial?: boolean | undefined },
): Promise<PushResult> {
  const space = new ByteSpace(sources);
  const manifest = space.manifest(options.partial ?? false);
  return new Upload(connection, { ...header, manifest, manifestDigest: space.manifestDigest }, space, options).run();
}

/** Sends one push until it is done, fails, or its deadline has passed. */
class Upload {
  readonly #connection: Connection;
  readonly #header: PushHeader;
  readonly #space: ByteSpace;
  readonly #options: SendOptions;
  readonly #chunkBytes: number;
  readonly #deadline: number;
  readonly #startedAt = performance.now();
  #sentBytes = 0;
  #numResumes = 0;
  #hasReachedDaemon = false;

  constructor(connection: Connection, header: PushHeader, space: ByteSpace, options: SendOptions) {
    this.#connection = connection;
    this.#header = header;
    this.#space = space;
    this.#options = options;
    this.#chunkBytes = chunkBytesOf(options);
    this.#deadline = deadlineOf(options.timeoutMs ?? connection.timeouts.pushMs);
  }

  async run(): Promise<PushResult> {
    const checksum = this.#options.checksum === false ? undefined : await loadChecksum();
    let missing: readonly ByteRange[] = this.#header.action === PushAction.VALIDATE ? [] : this.#space.ranges;
    for (;;) {
      let known: PushResult | undefined;
      try {
        return await this.#send(missing, checksum);
      } catch (error) {
        const mayResume = error instanceof UnavailableError || error instanceof PushTruncatedError;
        const hasReachedDaemon = this.#hasReachedDaemon || error instanceof PushTruncatedError;
        if (!mayResume || !hasReachedDaemon || this.#numResumes >= MAX_RESUMES) throw this.#late(error);
        this.#numResumes++;
        known = await this.#lookUp(error);
      }
      if (known === undefined) {
        missing = this.#space.ranges; // nothing of it had arrived
        continue;
      }
      const isOwn = known.push.attempt === this.#header.attempt;
      if (known.push.state === "valid") return known;
      if (known.push.state === "applied" && isOwn) return this.#answerOf(known); // only the answer was lost
      missing = isOwn ? this.#checked(known.push.missing) : this.#space.ranges; // those of another attempt are compared
    }
  }

  /** What the daemon misses, which must be bytes of this push. */
  #checked(missing: readonly ByteRange[]): readonly ByteRange[] {
    const wrong = missing.find(([start, end]) => start < 0 || start > end || end > this.#space.totalBytes);
    if (wrong === undefined) return missing;
    const [start, end] = wrong;
    throw new GenserveError(`the daemon misses bytes ${start} to ${end} of a push of ${this.#space.totalBytes}`);
  }

  /** The lost answer to this push, which is applied; what `getPush` says has to do where it cannot be had. */
  async #answerOf(known: PushResult): Promise<PushResult> {
    try {
      return await this.#send([], undefined);
    } catch {
      this.#options.signal?.throwIfAborted();
      return known;
    }
  }

  /** One stream: the header, the bytes of `ranges`, the end. */
  async #send(ranges: readonly ByteRange[], checksum: Checksum | undefined): Promise<PushResult> {
    this.#sentBytes = this.#space.totalBytes - numBytes(ranges);
    const stream = this.#connection.clientStream(WeightServiceService.pushWeights, {
      timeoutMs: this.#deadline - Date.now(),
      signal: this.#options.signal,
    });
    // The answer says why the daemon stopped reading.
    const answered = new AbortController();
    const whenAnswered = () => {
      answered.abort();
    };
    stream.answer.then(whenAnswered, whenAnswered);
    try {
      await this.#write(stream, ranges, checksum, answered.signal);
    } catch (error) {
      if (!answered.signal.aborted) {
        stream.call.cancel();
        throw error; // of a file that cannot be read, say
      }
    }
    return pushResultOf(await stream.answer);
  }

  async #write(
    { call }: ClientStream<unknown>,
    ranges: readonly ByteRange[],
    checksum: Checksum | undefined,
    answered: AbortSignal,
  ): Promise<void> {
    const header = { frame: { $case: "header" as const, value: this.#header } };
    call.write(Buffer.from(PushWeightsRequest.encode(header).finish()), (error: unknown) => {
      this.#hasReachedDaemon ||= !error; // the connection has taken it
    });
    // Waiting for a frame is the back-pressure: a frame comes back when the connection has taken it.
    const frames = new ChunkFrames(MAX_FRAMES_AHEAD, Math.min(this.#chunkBytes, numBytes(ranges)), checksum);
    for (const [rangeStart, rangeEnd] of ranges) {
      for (let offset = rangeStart; offset < rangeEnd; offset += this.#chunkBytes) {
        const frame = await frames.take(answered);
        const data = frame.begin(offset, Math.min(this.#chunkBytes, rangeEnd - offset));
        await this.#space.read(data, offset);
        call.write(frame.seal(), () => {
          frames.release(frame);
        });
        this.#report(data.length);
      }
    }
    call.write(END_FRAME);
    call.end();
  }

  /** The push as the daemon knows it; undefined if it does not. Throws `error` if the daemon cannot be asked. */
  async #lookUp(error: unknown): Promise<PushResult | undefined> {
    const until = Math.min(this.#deadline, Date.now() + RECONNECT_TIMEOUT_MS);
    let pauseMs = FIRST_PAUSE_MS;
    for (;;) {
      try {
        const request = { pushId: this.#header.pushId };
        return pushResultOf(
          await this.#connection.unary(WeightServiceService.getPush, request, {
            timeoutMs: until - Date.now(),
            signal: this.#options.signal,
            waitForReady: true,
          }),
        );
      } catch (failure) {
        if (failure instanceof PushNotFoundError) return undefined;
        if (failure instanceof DeadlineError) throw error;
        if (!(failure instanceof UnavailableError)) throw failure;
        // This connection broke with that of the push, which noticed it first; or a proxy waits for the daemon.
        if (Date.now() + pauseMs >= until) throw error;
        await pause(pauseMs, this.#options.signal);
        pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS);
      }
    }
  }

  #late(error: unknown): unknown {
    if (!(error instanceof DeadlineError) || error.metadata["push_id"] !== undefined) return error;
    const { pushId } = this.#header;
    const message = `push ${JSON.stringify(pushId)} did not end in time, and may still be applied: getPush tells`;
    return new DeadlineError(message, { ...detailsOf(error), metadata: { push_id: pushId }, cause: error });
  }

  #report(newBytes: number): void {
    this.#sentBytes += newBytes;
    this.#options.onProgress?.({
      pushId: this.#header.pushId,
      sentBytes: this.#sentBytes,
      totalBytes: this.#space.totalBytes,
      elapsedMs: performance.now() - this.#startedAt,
      numResumes: this.#numResumes,
    });
  }
}
