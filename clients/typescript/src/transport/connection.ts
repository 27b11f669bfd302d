/** The connection to one daemon: deadlines, metadata, cancellation and typed errors. It does not know what calls mean. */

import {
  Client,
  type ClientDuplexStream,
  type ClientReadableStream,
  type ClientWritableStream,
  Metadata,
  type ServiceError,
} from "@grpc/grpc-js";
import { ClientClosedError, StreamOverError } from "../errors.js";
import { SERVICE_CONFIG } from "../wire/service_config.js";
import { type Cancellable, SignalledCalls } from "./cancellation.js";
import { type ConnectionOptions, type Reach, reachOf } from "./settings.js";
import { errorOf } from "./status.js";
import { type CallOptions, deadlineOf, type Timeouts, timeoutsOf } from "./timeouts.js";

/** What a generated definition of a method tells. */
interface MethodTypes<Request, Response> {
  readonly path: string;
  readonly requestSerialize: (request: Request) => Buffer;
  readonly responseDeserialize: (bytes: Buffer) => Response;
}

/** A method of which one request goes, and one response comes. */
export interface UnaryMethod<Request, Response> extends MethodTypes<Request, Response> {
  readonly requestStream: false;
  readonly responseStream: false;
}

/** A method that streams responses. */
export interface ServerStreamMethod<Request, Response> extends MethodTypes<Request, Response> {
  readonly requestStream: false;
  readonly responseStream: true;
}

/** A method that streams requests. */
export interface ClientStreamMethod<Request, Response> extends MethodTypes<Request, Response> {
  readonly requestStream: true;
  readonly responseStream: false;
}

/** A method that streams both. */
export interface DuplexMethod<Request, Response> extends MethodTypes<Request, Response> {
  readonly requestStream: true;
  readonly responseStream: true;
}

/** How a call is made. One without `timeoutMs` has the time of control calls. */
export interface CallSettings extends CallOptions {
  /** Waits for a connection instead of failing without one. */
  waitForReady?: boolean;
}

/** A call that streams requests, and its answer. */
export interface ClientStream<Response> {
  readonly call: ClientWritableStream<Buffer>;
  readonly answer: Promise<Response>;
}

/** A call that streams both ways. Its responses must be read. */
export interface DuplexCall<Request, Response> {
  readonly call: ClientDuplexStream<Request, Response>;
  readonly responses: AsyncGenerator<Response, void, undefined>;
  /** Returns when the connection takes the request. Throws what ended the call, or StreamOverError. */
  write(request: Request): Promise<void>;
}

/** A call that others may end, and why it failed. */
interface BegunCall<Call> {
  readonly call: Call;
  readonly signal: AbortSignal | undefined;
  readonly release: () => void;
  failure: Error | undefined;
  isOver: boolean;
}

const CHANNEL_OPTIONS = {
  "grpc.max_receive_message_length": -1,
  "grpc.max_send_message_length": -1,
  // A daemon that restarts is found again within seconds; gRPC's own backoff grows to two minutes.
  "grpc.initial_reconnect_backoff_ms": 200,
  "grpc.max_reconnect_backoff_ms": 5_000,
  // gRPC servers close connections with pings faster than five minutes by default.
  "grpc.keepalive_time_ms": 310_000,
  // Each client has its own connection, so that a push does not delay generation.
  "grpc.use_local_subchannel_pool": 1,
  // Daemons are nearby: do not use a proxy that is meant for the web.
  "grpc.enable_http_proxy": 0,
  "grpc.service_config": SERVICE_CONFIG,
};

/** One channel to one daemon, opened by the first call, and one for each push. */
export class Connection {
  readonly address: string;
  readonly timeouts: Readonly<Timeouts>;
  readonly #reach: Reach;
  readonly #client: Client;
  readonly #running = new Set<Cancellable>();
  readonly #signalled = new SignalledCalls();
  #isClosed = false;

  constructor(address: string | undefined, options: ConnectionOptions) {
    this.#reach = reachOf(address, options);
    this.address = this.#reach.address;
    this.timeouts = timeoutsOf(options.timeouts ?? {});
    this.#client = this.#newClient({});
  }

  /** Makes one call. */
  async unary<Request, Response>(
    method: UnaryMethod<Request, Response>,
    request: Request,
    options: CallSettings,
  ): Promise<Response> {
    this.#checkMayBegin(options.signal);
    return new Promise((resolve, reject) => {
      const call = this.#client.makeUnaryRequest(
        method.path,
        method.requestSerialize,
        method.responseDeserialize,
        request,
        this.#metadata(options.waitForReady),
        { deadline: this.#deadline(options) },
        (error, response) => {
          release();
          // An AbortSignal may have any reason.
          // eslint-disable-next-line @typescript-eslint/prefer-promise-reject-errors
          if (error !== null) reject(this.#typed(error, options.signal));
          else resolve(response as Response);
        },
      );
      const release = this.#watch(call, options.signal);
    });
  }

  /** The responses of a call that begins with the first of them; leaving the loop ends it in the daemon. */
  async *responses<Request, Response>(
    method: ServerStreamMethod<Request, Response>,
    request: Request,
    options: CallSettings,
  ): AsyncGenerator<Response, void, undefined> {
    this.#checkMayBegin(options.signal);
    const call = this.#client.makeServerStreamRequest(
      method.path,
      method.requestSerialize,
      method.responseDeserialize,
      request,
      this.#metadata(options.waitForReady),
      { deadline: this.#deadline(options) },
    );
    yield* this.#read(this.#begun(call, options.signal));
  }

  /** Begins a call that streams both ways. */
  duplex<Request, Response>(
    method: DuplexMethod<Request, Response>,
    options: CallSettings,
  ): DuplexCall<Request, Response> {
    this.#checkMayBegin(options.signal);
    const call = this.#client.makeBidiStreamRequest(
      method.path,
      method.requestSerialize,
      method.responseDeserialize,
      this.#metadata(options.waitForReady),
      { deadline: this.#deadline(options) },
    );
    const begun = this.#begun(call, options.signal);
    const waiting = new Set<() => void>(); // for a connection that takes their request
    call.on("status", () => {
      for (const fail of waiting) fail();
    });
    const write = (request: Request) =>
      new Promise<void>((resolve, reject) => {
        const fail = () => {
          // An AbortSignal may have any reason.
          // eslint-disable-next-line @typescript-eslint/prefer-promise-reject-errors
          reject(begun.failure === undefined ? new StreamOverError() : this.#typed(begun.failure, options.signal));
        };
        if (begun.isOver) {
          fail();
          return;
        }
        waiting.add(fail);
        call.write(request, (error: unknown) => {
          if (error) return; // the status says why
          waiting.delete(fail);
          resolve();
        });
      });
    return { call, responses: this.#read<Response>(begun), write };
  }

  /** Sends encoded requests over a connection of its own, which ends with the call. */
  clientStream<Request, Response>(
    method: ClientStreamMethod<Request, Response>,
    options: CallSettings,
  ): ClientStream<Response> {
    this.#checkMayBegin(options.signal);
    const metadata = this.#metadata(options.waitForReady);
    const deadline = this.#deadline(options);
    // Nothing is kept to be sent again, for a push that breaks is resumed by who sends it. So a write is complete when
    // the connection has taken it, and not before.
    const client = this.#newClient({ "grpc.enable_retries": 0, "grpc.per_rpc_retry_buffer_size": 0 });
    let settle!: { resolve: (response: Response) => void; reject: (error: unknown) => void };
    const answer = new Promise<Response>((resolve, reject) => (settle = { resolve, reject }));
    answer.catch(() => undefined); // it may fail before anybody waits for it
    const call = client.makeClientStreamRequest(
      method.path,
      (frame: Buffer) => frame,
      method.responseDeserialize,
      metadata,
      { deadline },
      (error, response) => {
        release();
        client.close();
        if (error !== null) settle.reject(this.#typed(error, options.signal));
        else settle.resolve(response as Response);
      },
    );
    call.on("error", () => undefined); // the answer has it
    const release = this.#watch(call, options.signal);
    return { call, answer };
  }

  /** Ends the connection; running calls throw ClientClosedError. */
  close(): void {
    this.#isClosed = true;
    for (const call of this.#running) call.cancel();
    this.#client.close();
  }

  /** Watches a call from its beginning: it may fail before anybody reads. */
  #begun<Call extends ClientReadableStream<unknown>>(call: Call, signal: AbortSignal | undefined): BegunCall<Call> {
    const begun: BegunCall<Call> = {
      call,
      signal,
      release: this.#watch(call, signal),
      failure: undefined,
      isOver: false,
    };
    call.on("error", (error: Error) => {
      begun.failure ??= error;
    });
    call.on("status", () => {
      begun.isOver = true;
      begun.release();
    });
    return begun;
  }

  async *#read<Response>(begun: BegunCall<ClientReadableStream<Response>>): AsyncGenerator<Response, void, undefined> {
    const { call, signal, release } = begun;
    try {
      for await (const response of call) {
        signal?.throwIfAborted(); // what had come before it is not wanted either
        yield response as Response;
      }
      if (begun.failure !== undefined) throw begun.failure;
    } catch (error) {
      throw this.#typed(error, signal);
    } finally {
      release();
      call.cancel();
    }
  }

  #newClient(options: Record<string, number>): Client {
    const { address, credentials, channelOptions, interceptors } = this.#reach;
    return new Client(address, credentials, { ...CHANNEL_OPTIONS, ...channelOptions, ...options, interceptors });
  }

  #metadata(waitForReady = false): Metadata {
    const metadata = new Metadata({ waitForReady });
    for (const [key, value] of this.#reach.metadata()) metadata.set(key, value);
    return metadata;
  }

  #deadline({ timeoutMs }: CallSettings): number {
    return deadlineOf(timeoutMs ?? this.timeouts.controlMs);
  }

  #checkMayBegin(signal: AbortSignal | undefined): void {
    if (this.#isClosed) throw this.#closedError();
    signal?.throwIfAborted();
  }

  /** Cancels the call when the signal says so or the client is closed, until it is released. */
  #watch(call: Cancellable, signal: AbortSignal | undefined): () => void {
    this.#running.add(call);
    const forget = signal === undefined ? undefined : this.#signalled.add(signal, call);
    return () => {
      this.#running.delete(call);
      forget?.();
    };
  }

  #typed(error: unknown, signal: AbortSignal | undefined): unknown {
    if (signal?.aborted === true) return signal.reason;
    if (this.#isClosed) return this.#closedError();
    return isServiceError(error) ? errorOf(error, this.address) : error;
  }

  #closedError(): ClientClosedError {
    return new ClientClosedError(`the client of ${this.address} is closed`);
  }
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "details" in error && "metadata" in error;
}
