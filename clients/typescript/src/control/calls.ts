/** The calls of ControlService. */

import { randomUUID } from "node:crypto";
import type { Connection } from "../transport/connection.js";
import { optionalDuration, waitOf } from "../transport/fields.js";
import { CALL, checkOptions, checkText } from "../transport/options.js";
import { type CallOptions, limited } from "../transport/timeouts.js";
import { valueOf } from "../transport/words.js";
import { ControlServiceService, type PauseRequest } from "../wire/genserve/v1/control.js";
import * as types from "../wire/genserve/v1/types.js";
import { serverInfoOf, type ServerInfo } from "./server-info.js";
import {
  type EngineState,
  type KvPolicy,
  leaseOf,
  type PauseLease,
  type PauseMode,
  type PauseResult,
  type ResumeResult,
  stateOf,
  type Status,
  statusOf,
} from "./state.js";

/** How to pause. */
export interface PauseOptions {
  /** What happens to requests in flight; default "keep". */
  mode?: PauseMode | undefined;
  /** What happens to the KV cache; default "reuse". */
  kvPolicy?: KvPolicy | undefined;
  /** Name of the holder, for people: it is shown in the status. */
  holder?: string | undefined;
  /** When the lease expires unless it is renewed; default 60 s. */
  ttlMs?: number | undefined;
  /** Longest wait for the pause to begin; default 60 s. If it ends, nothing is paused. */
  timeoutMs?: number | undefined;
  /** Ends the wait for the pause; a lease that the daemon has just granted is ended first. */
  signal?: AbortSignal | undefined;
}

/** How often a watcher is told. */
export interface WatchOptions extends CallOptions {
  /** Also tells at least this often while the load changes; default 1 s. */
  intervalMs?: number | undefined;
  /** Also tells this often if nothing changes; default never. */
  heartbeatMs?: number | undefined;
}

/** A part of the engine that sleeps and wakes up. */
export type SleepTag = "weights" | "kv_cache" | "scheduling";

/** How to put the engine to sleep. */
export interface SleepOptions {
  /** What happens to requests in flight; default "keep": they continue after the sleep. */
  mode?: PauseMode | undefined;
  /** As in vLLM: 0 keeps all memory, 1 keeps the weights on the host, 2 drops weights and KV cache; default 1. */
  level?: 0 | 1 | 2 | undefined;
  /** The parts to release; default: as the level says. */
  tags?: readonly SleepTag[] | undefined;
  /** Longest wait for the sleep to begin; default 60 s. If it ends, the engine is awake. */
  timeoutMs?: number | undefined;
  /** Ends the wait for the sleep. */
  signal?: AbortSignal | undefined;
}

const PAUSE_TIMEOUT_MS = 60_000;
const GIVE_UP_TIMEOUT_MS = 2_000;
const SLEEP_TIMEOUT_MS = 60_000;
const WAKE_UP_TIMEOUT_MS = 300_000;

/** Pause, resume, sleep and status. */
export class ControlCalls {
  readonly #connection: Connection;

  constructor(connection: Connection) {
    this.#connection = connection;
  }

  async status(options: CallOptions): Promise<Status> {
    checkOptions(options, CALL);
    return statusOf(await this.#connection.unary(ControlServiceService.getStatus, {}, options));
  }

  async *watch(options: WatchOptions): AsyncGenerator<Status, void, undefined> {
    checkOptions(options, { ...CALL, intervalMs: "milliseconds", heartbeatMs: "milliseconds" });
    const request = {
      interval: optionalDuration(options.intervalMs, "intervalMs"),
      heartbeat: optionalDuration(options.heartbeatMs, "heartbeatMs"),
    };
    const timed = limited(options, Infinity);
    for await (const response of this.#connection.responses(ControlServiceService.watchStatus, request, timed)) {
      yield statusOf(response);
    }
  }

  async serverInfo(options: CallOptions): Promise<ServerInfo> {
    checkOptions(options, CALL);
    return serverInfoOf(await this.#connection.unary(ControlServiceService.getServerInfo, {}, options));
  }

  async pause(options: PauseOptions): Promise<PauseResult> {
    checkOptions(options, { ...CALL, mode: "words", kvPolicy: "words", holder: "string", ttlMs: "milliseconds" });
    const timeoutMs = options.timeoutMs ?? PAUSE_TIMEOUT_MS;
    const request: PauseRequest = {
      mode: valueOf(types.PauseMode, options.mode, "mode"),
      kvPolicy: valueOf(types.KvPolicy, options.kvPolicy, "kvPolicy"),
      holder: options.holder ?? "",
      ttl: optionalDuration(options.ttlMs, "ttlMs"),
      noExpiry: false,
      requestId: randomUUID(),
      fleetLeaseId: "",
      timeout: waitOf(timeoutMs),
    };
    options.signal?.throwIfAborted();
    try {
      const response = await this.#connection.unary(ControlServiceService.pause, request, {
        timeoutMs: timeoutMs + this.#connection.timeouts.pauseSlackMs,
        signal: options.signal,
      });
      return {
        lease: leaseOf(response.lease),
        requestsKept: response.requestsKept,
        requestsAborted: response.requestsAborted,
        state: stateOf(response.state),
      };
    } catch (error) {
      if (options.signal?.aborted === true) await this.#giveUp(request);
      throw error;
    }
  }

  /**
   * Ends the lease of a pause whose caller does not wait any more. The daemon grants none after it has seen the
   * cancellation, but its answer may have been on the way, and only a repeat says which lease was granted.
   */
  async #giveUp(request: PauseRequest): Promise<void> {
    const deadline = Date.now() + GIVE_UP_TIMEOUT_MS;
    const timed = () => ({ timeoutMs: deadline - Date.now() });
    try {
      if ((await this.status(timed())).state.pauses.length === 0) return;
      // Should it pause after all, then for a moment, and without harm to requests.
      const brief = { ttl: waitOf(GIVE_UP_TIMEOUT_MS), timeout: waitOf(GIVE_UP_TIMEOUT_MS) };
      const repeat = { ...request, ...brief, mode: types.PauseMode.KEEP, kvPolicy: types.KvPolicy.REUSE };
      const { lease } = await this.#connection.unary(ControlServiceService.pause, repeat, timed());
      await this.resume(leaseOf(lease).leaseId, timed());
    } catch {
      // The lease expires, and the caller has aborted anyway.
    }
  }

  async renewPause(leaseId: string, options: CallOptions & { ttlMs?: number | undefined }): Promise<PauseLease> {
    checkOptions(options, { ...CALL, ttlMs: "milliseconds" });
    const request = { leaseId: checkText(leaseId, "leaseId"), ttl: optionalDuration(options.ttlMs, "ttlMs") };
    const response = await this.#connection.unary(ControlServiceService.renewPause, request, options);
    return leaseOf(response.lease);
  }

  async resume(leaseId: string, options: CallOptions & { force?: boolean | undefined }): Promise<ResumeResult> {
    checkOptions(options, { ...CALL, force: "boolean" });
    const request = { leaseId: checkText(leaseId, "leaseId"), force: options.force ?? false };
    const response = await this.#connection.unary(ControlServiceService.resume, request, options);
    return { leaseExpired: response.leaseExpired, state: stateOf(response.state) };
  }

  async resetCache(options: CallOptions & { resetRunningRequests?: boolean | undefined }): Promise<boolean> {
    checkOptions(options, { ...CALL, resetRunningRequests: "boolean" });
    const request = { resetRunningRequests: options.resetRunningRequests ?? false };
    return (await this.#connection.unary(ControlServiceService.resetCache, request, options)).reset;
  }

  async sleep(options: SleepOptions): Promise<EngineState> {
    checkOptions(options, { ...CALL, mode: "words", level: "uint32", tags: "strings" });
    const timeoutMs = options.timeoutMs ?? SLEEP_TIMEOUT_MS;
    const request = {
      mode: valueOf(types.PauseMode, options.mode, "mode"),
      level: options.level,
      tags: [...(options.tags ?? [])],
      timeout: waitOf(timeoutMs),
    };
    const response = await this.#connection.unary(ControlServiceService.sleep, request, {
      timeoutMs: timeoutMs + this.#connection.timeouts.pauseSlackMs,
      signal: options.signal,
    });
    return stateOf(response.state);
  }

  async wakeUp(options: CallOptions & { tags?: readonly SleepTag[] | undefined }): Promise<EngineState> {
    checkOptions(options, { ...CALL, tags: "strings" });
    const request = { tags: [...(options.tags ?? [])] };
    const timed = limited(options, WAKE_UP_TIMEOUT_MS);
    return stateOf((await this.#connection.unary(ControlServiceService.wakeUp, request, timed)).state);
  }

  async drain(options: CallOptions & { drainTimeoutMs?: number | undefined }): Promise<EngineState> {
    checkOptions(options, { ...CALL, drainTimeoutMs: "milliseconds" });
    const request = { drainTimeout: optionalDuration(options.drainTimeoutMs, "drainTimeoutMs") };
    return stateOf((await this.#connection.unary(ControlServiceService.drain, request, options)).state);
  }
}
