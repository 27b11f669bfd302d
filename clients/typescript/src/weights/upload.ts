/** Sends one push: streams the bytes, and when the stream breaks, those that are missing. */

import { DeadlineError, GenserveError, PushNotFoundError, PushTruncatedError } from "../errors.js";
import type { ClientStream, Connection } from "../transport/connection.js";
import { deadlineOf } from "../transport/timeouts.js";
import { PushAction, type PushHeader, PushWeightsRequest, WeightServiceService } from "../wire/genserve/v1/weights.js";
import { ByteSpace } from "./byte-space.js";
import { loadChecksum } from "./checksum.js";
import { type Checksum, ChunkFrames } from "./chunk-frame.js";
import { chunkBytesOf, type SendOptions } from "./options.js";
import { isInterruption, Outage } from "./outage.js";
import { type PushResult, pushResultOf } from "./push.js";
import { type ByteRange, numBytes } from "./ranges.js";
import type { TensorSource } from "./sources.js";

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
  readonly #outage: Outage;
  readonly #startedAt = performance.now();
  /** What the daemon is to get. */
  readonly #wanted: readonly ByteRange[];
  #sentBytes = 0;
  /** Streams whose header a connection has taken. */
  #numStreams = 0;

  constructor(connection: Connection, header: PushHeader, space: ByteSpace, options: SendOptions) {
    this.#connection = connection;
    this.#header = header;
    this.#space = space;
    this.#options = options;
    this.#chunkBytes = chunkBytesOf(options);
    this.#deadline = deadlineOf(options.timeoutMs ?? connection.timeouts.pushMs);
    this.#wanted = header.action === PushAction.VALIDATE ? [] : space.ranges;
    const { pushId } = header;
    const ifLate = ", and may still be applied: getPush tells";
    const transfer = { name: `push ${JSON.stringify(pushId)}`, ifLate, metadata: { push_id: pushId } };
    this.#outage = new Outage(transfer, this.#deadline, options.signal);
  }

  async run(): Promise<PushResult> {
    const checksum = this.#options.checksum === false ? undefined : await loadChecksum();
    let missing = this.#wanted;
    let leastBytes = numBytes(missing);
    for (;;) {
      try {
        return await this.#send(missing, checksum);
      } catch (error) {
        if (isLate(error)) throw this.#outage.late(error);
        const hasReachedDaemon = this.#numStreams > 0 || error instanceof PushTruncatedError;
        if (!hasReachedDaemon || !isInterruption(error)) throw error;
        const known = await this.#outage.answerTo(error, (timeoutMs) => this.#lookUp(timeoutMs));
        const isOwn = known?.push.attempt === this.#header.attempt;
        if (known?.push.state === "applied" && isOwn) return await this.#answerOf(known); // only the answer was lost
        // Of a push that is unknown nothing has arrived, and bytes of another attempt are compared.
        missing = known !== undefined && isOwn ? this.#checked(known.push.missing) : this.#wanted;
        if (numBytes(missing) < leastBytes) {
          leastBytes = numBytes(missing);
          this.#outage.over();
        }
        await this.#outage.untilNextAttempt(error);
      }
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
    // No chunk is read before there is a connection for it.
    await new Promise<void>((resolve, reject) => {
      answered.addEventListener("abort", reject, { once: true });
      call.write(Buffer.from(PushWeightsRequest.encode(header).finish()), (error: unknown) => {
        if (error) return; // the answer says why
        this.#numStreams++;
        resolve();
      });
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

  /** The push as the daemon knows it; undefined if it does not. */
  async #lookUp(timeoutMs: number): Promise<PushResult | undefined> {
    const { pushId } = this.#header;
    // gRPC waits for the connection, instead of using up its attempts while there is none.
    const call = { timeoutMs, signal: this.#options.signal, waitForReady: true };
    try {
      return pushResultOf(await this.#connection.unary(WeightServiceService.getPush, { pushId }, call));
    } catch (error) {
      if (error instanceof PushNotFoundError) return undefined;
      throw error;
    }
  }

  #report(newBytes: number): void {
    this.#sentBytes += newBytes;
    this.#options.onProgress?.({
      pushId: this.#header.pushId,
      sentBytes: this.#sentBytes,
      totalBytes: this.#space.totalBytes,
      elapsedMs: performance.now() - this.#startedAt,
      numResumes: Math.max(this.#numStreams - 1, 0),
    });
  }
}

/** Whether the deadline of the push has passed. An error of the daemon names the push itself, and says more. */
function isLate(error: unknown): error is DeadlineError {
  return error instanceof DeadlineError && error.metadata["push_id"] === undefined;
}
