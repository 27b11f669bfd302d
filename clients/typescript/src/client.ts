import {
  ControlCalls,
  type PauseOptions,
  type SleepOptions,
  type SleepTag,
  type WatchOptions,
} from "./control/calls.js";
import { holdPause, type HeldPause } from "./control/held-pause.js";
import { waitReady } from "./control/readiness.js";
import type { ServerInfo } from "./control/server-info.js";
import type { EngineState, PauseLease, PauseResult, ResumeResult, Status } from "./control/state.js";
import {
  type AbortResult,
  type CompletedGeneration,
  GenerationCalls,
  type GenerateManyOptions,
} from "./generation/calls.js";
import type { ManyStream } from "./generation/many-stream.js";
import type { ChatMessage, ChatOptions, GenerateOptions, Prompt, RequestOptions } from "./generation/options.js";
import type { Delta, Generation } from "./generation/results.js";
import { Connection } from "./transport/connection.js";
import type { ConnectionOptions } from "./transport/settings.js";
import type { CallOptions } from "./transport/timeouts.js";
import { type ServedWeights, WeightCalls } from "./weights/calls.js";
import type { PulledWeights, PullOptions } from "./weights/download.js";
import { type Lora, type LoraAdapter, LoraCalls } from "./weights/lora.js";
import type { ApplyOptions, LoraPushOptions, PushOptions } from "./weights/options.js";
import type { Push, PushResult } from "./weights/push.js";
import type { Tensor } from "./weights/sources.js";

/**
 * A client of one daemon, or of a router. It connects with the first call, and again when the connection breaks.
 *
 * Every call has a deadline, and ends when its `signal` is aborted. A call that fails throws a `GenserveError`, of the
 * class that its reason has.
 */
export class Client implements Disposable {
  readonly #connection: Connection;
  readonly #generation: GenerationCalls;
  readonly #weights: WeightCalls;
  readonly #loras: LoraCalls;
  readonly #control: ControlCalls;

  /**
   * @param address "HOST:PORT" or "unix:PATH"; default: $GENSERVE_TARGET, the configuration file, 127.0.0.1:50051
   */
  constructor(address?: string, options: ConnectionOptions = {}) {
    this.#connection = new Connection(address, options);
    this.#generation = new GenerationCalls(this.#connection);
    this.#weights = new WeightCalls(this.#connection);
    this.#loras = new LoraCalls(this.#connection);
    this.#control = new ControlCalls(this.#connection);
  }

  /** Where the daemon is. */
  get address(): string {
    return this.#connection.address;
  }

  /**
   * Generates from one prompt and returns the whole result. A request that fails or exceeds `timeoutMs` returns nothing:
   * `timeBudgetMs` keeps the tokens so far.
   */
  generate(prompt: Prompt, options: GenerateOptions = {}): Promise<Generation> {
    return this.#generation.generate(prompt, options);
  }

  /** Generates from one prompt and yields new output as it comes. Leaving the loop ends the request in the daemon. */
  stream(prompt: Prompt, options: GenerateOptions = {}): AsyncGenerator<Delta, void, undefined> {
    return this.#generation.stream(prompt, options);
  }

  /**
   * Generates from many prompts over one call, and returns the results in the order of the prompts. The options apply to
   * every prompt; one that is given as `{ prompt, … }` has its own, which come before them.
   *
   * A request that fails has its `error`, and its tokens so far; the others go on. Throws only what ends all of them. If
   * the daemon's queue is full, the rest is sent when it has room.
   */
  generateMany(prompts: Iterable<Prompt | RequestOptions>, options: GenerateManyOptions = {}): Promise<Generation[]> {
    return this.#generation.generateMany(prompts, options);
  }

  /** The same, and yields each result as soon as it is complete. Leaving the loop ends the requests that still run. */
  generateAsCompleted(
    prompts: Iterable<Prompt | RequestOptions>,
    options: GenerateManyOptions = {},
  ): AsyncGenerator<CompletedGeneration, void, undefined> {
    return this.#generation.generateAsCompleted(prompts, options);
  }

  /**
   * Opens one call for many requests, which are submitted and aborted at any time, and yields their new output as it
   * comes. A request that is refused, for a full queue too, or that fails is an item with its `error`.
   */
  streamMany(options: CallOptions = {}): ManyStream {
    return this.#generation.streamMany(options);
  }

  /** Ends requests of any client, or with `all` every request. Their results finish as "aborted" and keep their tokens. */
  abort(
    requestIds: readonly string[],
    options: CallOptions & { all?: boolean | undefined } = {},
  ): Promise<AbortResult> {
    return this.#generation.abort(requestIds, options);
  }

  /** The token ids that `generate` would use for text or the messages of a chat. */
  tokenize(
    prompt: string | readonly ChatMessage[],
    options: CallOptions & ChatOptions & { addSpecialTokens?: boolean | undefined } = {},
  ): Promise<number[]> {
    return this.#generation.tokenize(prompt, options);
  }

  /** The text of token ids. */
  detokenize(
    tokenIds: readonly number[],
    options: CallOptions & { skipSpecialTokens?: boolean | undefined } = {},
  ): Promise<string> {
    return this.#generation.detokenize(tokenIds, options);
  }

  /**
   * Streams a checkpoint into the daemon, which applies all of it or nothing.
   *
   * A stream that breaks is resumed with what is missing, within `timeoutMs`; after 30 s without progress this throws
   * UnavailableError. Aborting the `signal` stops sending, and nothing is applied unless every byte had arrived. Throws
   * ManifestMismatchError, which names the tensors, and CheckpointFileError.
   *
   * @param path a .safetensors file, the index of a sharded checkpoint, or the directory of either. The files must not
   *   change before the push has ended.
   */
  pushCheckpoint(path: string, options: PushOptions): Promise<PushResult> {
    return this.#weights.pushCheckpoint(path, options);
  }

  /** The same for tensors in memory, by their names in the checkpoint. */
  pushTensors(tensors: Readonly<Record<string, Tensor>>, options: PushOptions): Promise<PushResult> {
    return this.#weights.pushTensors(tensors, options);
  }

  /** Progress and outcome of a push, and the bytes that it misses. */
  getPush(pushId: string, options: CallOptions = {}): Promise<PushResult> {
    return this.#weights.getPush(pushId, options);
  }

  /** Applies a push that was sent with `action: "stage"` or "prepare". A repeat answers the same. */
  commitPush(pushId: string, options: ApplyOptions = {}): Promise<PushResult> {
    return this.#weights.commitPush(pushId, options);
  }

  /** Frees a staged or prepared push; with `force` even while somebody sends it. */
  discardPush(pushId: string, options: CallOptions & { force?: boolean | undefined } = {}): Promise<Push> {
    return this.#weights.discardPush(pushId, options);
  }

  /** The served version, the tensors that a push must bring and, on request, digests of the live weights (seconds). */
  getWeights(options: CallOptions & { includeDigests?: boolean | undefined } = {}): Promise<ServedWeights> {
    return this.#weights.getWeights(options);
  }

  /**
   * Returns all served weights, in memory. A stream that breaks is continued as that of a push is. Throws
   * NotResidentError, and WeightVersionMismatchError, also if the version is replaced meanwhile.
   */
  pullWeights(options: PullOptions = {}): Promise<PulledWeights> {
    return this.#weights.pullWeights(options);
  }

  /**
   * Streams a LoRA adapter into the daemon, whose later requests with this `loraName` use it. Nothing is paused. One
   * that is loaded under the name is replaced: requests that run go on with it.
   *
   * @param adapter tensors and PEFT's configuration, or a directory that PEFT has saved
   */
  pushLora(loraName: string, adapter: string | LoraAdapter, options: LoraPushOptions = {}): Promise<PushResult> {
    return this.#loras.push(loraName, adapter, options);
  }

  /** Loads an adapter from a directory on the daemon's host, as PEFT saves it; otherwise as `pushLora`. */
  loadLora(loraName: string, path: string, options: CallOptions = {}): Promise<Lora> {
    return this.#loras.load(loraName, path, options);
  }

  /** Removes an adapter and returns it; running requests keep it. Throws LoraNotFoundError. */
  unloadLora(loraName: string, options: CallOptions = {}): Promise<Lora> {
    return this.#loras.unload(loraName, options);
  }

  /** The adapters that requests can use, in order of their names. */
  listLoras(options: CallOptions = {}): Promise<Lora[]> {
    return this.#loras.list(options);
  }

  /**
   * Runs `work` while generation is paused, and resumes however it ends.
   *
   * The lease is renewed every third of `ttlMs`. If it is lost, the `signal` of the lease is aborted, and this throws
   * PauseLeaseLostError when the work has ended: the engine may have run meanwhile.
   */
  paused<Result>(work: (lease: HeldPause) => Promise<Result> | Result, options: PauseOptions = {}): Promise<Result> {
    return holdPause(this.#control, options, work);
  }

  /** Pauses generation under a lease, which its holder renews and ends. Prefer `paused`, which does both. */
  pause(options: PauseOptions = {}): Promise<PauseResult> {
    return this.#control.pause(options);
  }

  /** Extends a lease to `ttlMs` from now; default: its first time to live. */
  renewPause(leaseId: string, options: CallOptions & { ttlMs?: number | undefined } = {}): Promise<PauseLease> {
    return this.#control.renewPause(leaseId, options);
  }

  /** Ends a lease, or with `force` every lease, whoever holds it. */
  resume(leaseId: string, options: CallOptions & { force?: boolean | undefined } = {}): Promise<ResumeResult> {
    return this.#control.resume(leaseId, options);
  }

  /**
   * Releases the memory of the device until `wakeUp`. Nothing is generated meanwhile, and nothing can be pushed before
   * the weights are awake. A sleep has no lease: the caller must wake up the engine.
   */
  sleep(options: SleepOptions = {}): Promise<EngineState> {
    return this.#control.sleep(options);
  }

  /** Wakes up these parts, or all. The engine runs when none of its memory is asleep any more. */
  wakeUp(options: CallOptions & { tags?: readonly SleepTag[] | undefined } = {}): Promise<EngineState> {
    return this.#control.wakeUp(options);
  }

  /**
   * Shuts the daemon down as SIGTERM does: new calls are refused, what runs may finish within `drainTimeoutMs` (default:
   * the daemon's --drain-timeout), and then its process ends. Returns when that has begun. A router shuts itself down,
   * and its replicas go on.
   */
  drain(options: CallOptions & { drainTimeoutMs?: number | undefined } = {}): Promise<EngineState> {
    return this.#control.drain(options);
  }

  /** Drops the prefix cache; false if blocks of running requests kept it alive. */
  resetCache(options: CallOptions & { resetRunningRequests?: boolean | undefined } = {}): Promise<boolean> {
    return this.#control.resetCache(options);
  }

  /**
   * Returns when the daemon serves; it need not be started yet. Throws DeadlineError after `timeoutMs` (default: 10
   * minutes), which names the phase of a daemon that answers, and what it does while it starts.
   */
  waitReady(options: CallOptions = {}): Promise<void> {
    return waitReady(this.#connection, this.#control, options);
  }

  /** State and load of the engine. */
  status(options: CallOptions = {}): Promise<Status> {
    return this.#control.status(options);
  }

  /** The same, at once and then on every change, until the loop is left: the one call without a deadline by default. */
  watch(options: WatchOptions = {}): AsyncGenerator<Status, void, undefined> {
    return this.#control.watch(options);
  }

  /** What the daemon serves and can do. */
  serverInfo(options: CallOptions = {}): Promise<ServerInfo> {
    return this.#control.serverInfo(options);
  }

  /** Ends the connection; running calls throw ClientClosedError. */
  close(): void {
    this.#connection.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}
