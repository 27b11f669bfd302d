/** The engine as the control plane reports it: state, leases, load, what is served. */

import { exactNumber } from "../transport/fields.js";
import { type ReceivedWord, type Word, wordOf } from "../transport/words.js";
import * as wire from "../wire/genserve/v1/control.js";
import * as types from "../wire/genserve/v1/types.js";
import * as weights from "../wire/genserve/v1/weights.js";

/** What the engine is doing. */
export type Phase = ReceivedWord<typeof types.Phase>;

/** What a pause does to requests in flight: freeze them, let them finish first, or end them. */
export type PauseMode = Word<typeof types.PauseMode>;

/** What happens to the KV cache: keep it, or prefill again under the weights that are served then. */
export type KvPolicy = Word<typeof types.KvPolicy>;

/** How far a push has come. */
export type PushState = ReceivedWord<typeof weights.PushState>;

/** The right to keep the engine paused. */
export interface PauseLease {
  leaseId: string;
  holder: string;
  mode: ReceivedWord<typeof types.PauseMode>;
  /** By the daemon's clock; undefined if it never expires. */
  expireTime: Date | undefined;
}

/** How far a start has come; times are by the daemon's clock. */
export interface Startup {
  /** What the daemon does now, for people, since `stepBeginTime`. */
  step: string;
  stepBeginTime: Date | undefined;
  beginTime: Date | undefined;
}

/** What the engine is doing. Running and waiting count sequences. */
export interface EngineState {
  /** Changes whenever the engine is started anew. */
  instanceId: string;
  /** 0 before the first push. */
  weightVersion: number;
  phase: Phase;
  pauses: PauseLease[];
  runningRequests: number;
  waitingRequests: number;
  /** The parts that are asleep, of scheduling, weights and kv_cache. */
  asleepTags: string[];
  /** A sleep of level 2 dropped the weights, and no version was applied since. */
  weightsDiscarded: boolean;
  /** What the daemon does before it serves. */
  startup: Startup | undefined;
}

/** The load of the engine. `kvUsage` and `prefixCacheHitRate` are in [0, 1]. */
export type Load = Readonly<wire.Load>;

/** How far a push in flight has come; times are by the daemon's clock. */
export interface PushInFlight {
  pushId: string;
  state: PushState;
  weightVersion: number;
  receivedBytes: number;
  totalBytes: number;
  loraName: string;
  /** Streams of it that are open. */
  numStreams: number;
  beginTime: Date | undefined;
  stateTime: Date | undefined;
}

/** State, load, and the pushes in flight. */
export interface Status {
  state: EngineState;
  load: Load;
  pushes: PushInFlight[];
  /** The daemon's clock, which the times of leases and pushes are by. */
  time: Date | undefined;
}

/** A lease, and what the pause did. */
export interface PauseResult {
  lease: PauseLease;
  /** Requests that are frozen and continue after the resume. */
  requestsKept: number;
  /** Requests that were ended. */
  requestsAborted: number;
  state: EngineState;
}

/** The state after a resume. */
export interface ResumeResult {
  /** The engine may have run before this call. */
  leaseExpired: boolean;
  state: EngineState;
}

/** From the wire. */
export function leaseOf(message: types.PauseLease | undefined): PauseLease {
  const { leaseId, holder, mode, expireTime } = message ?? types.PauseLease.create();
  return { leaseId, holder, mode: wordOf(types.PauseMode, mode), expireTime };
}

/** From the wire. */
export function stateOf(message: types.EngineState | undefined): EngineState {
  const { startup, phase, pauses, ...state } = message ?? types.EngineState.create();
  return {
    ...state,
    phase: wordOf(types.Phase, phase),
    pauses: pauses.map(leaseOf),
    startup: startup && { step: startup.step, stepBeginTime: startup.stepBeginTime, beginTime: startup.beginTime },
  };
}

/** From the wire. */
export function statusOf(message: wire.GetStatusResponse | wire.WatchStatusResponse): Status {
  return {
    state: stateOf(message.state),
    load: message.load ?? wire.Load.create(),
    pushes: message.pushes.map(pushInFlightOf),
    time: message.time,
  };
}

function pushInFlightOf(message: weights.PushInFlight): PushInFlight {
  const { state, receivedBytes, totalBytes, beginTime, stateTime, ...push } = message;
  return {
    ...push,
    state: wordOf(weights.PushState, state),
    receivedBytes: exactNumber(receivedBytes, "receivedBytes"),
    totalBytes: exactNumber(totalBytes, "totalBytes"),
    beginTime,
    stateTime,
  };
}
