/** A push in the daemon: its progress, and what applying it did. */

import { type EngineState, type PushState, stateOf } from "../control/state.js";
import { exactNumber, millisecondsOf } from "../transport/fields.js";
import { wordOf } from "../transport/words.js";
import * as wire from "../wire/genserve/v1/weights.js";
import type { ByteRange } from "./ranges.js";

/** A push as the daemon knows it. */
export interface Push {
  pushId: string;
  state: PushState;
  weightVersion: number;
  receivedBytes: number;
  totalBytes: number;
  /** What `attempt` lacks. */
  missing: ByteRange[];
  /** What is wrong; `tensor` is "" if it is not about one. */
  issues: { tensor: string; description: string }[];
  attempt: string;
  /** SHA-256 of its contents, in hex, of a push that was sent with one or is prepared. */
  contentDigest: string;
}

/** What applying a push did. */
export interface Applied {
  previousVersion: number;
  activeVersion: number;
  /** Wall time of each step: open, receive, verify, check, wait, prepare, pause, commit, resume. */
  stepMs: Record<string, number>;
  /** How long generation was paused for it; 0 if it was paused before and stays so. */
  pausedMs: number;
  requestsKept: number;
  requestsAborted: number;
  /** Tokens of running sequences whose keys and values have to be computed again. */
  recomputedTokens: number | undefined;
  /** Longest time that a sequence was without output; known after the answer: `getPush` tells it. */
  longestWaitMs: number | undefined;
  /** How long it took to free the previous version; known after the answer: `getPush` tells it. */
  discardMs: number | undefined;
}

/** The outcome of a push. */
export interface PushResult {
  push: Push;
  /** Undefined if nothing was applied. */
  applied: Applied | undefined;
  state: EngineState;
}

/** Progress of sending. */
export interface PushProgress {
  pushId: string;
  /** Counts each byte once, also after a resume. */
  sentBytes: number;
  totalBytes: number;
  elapsedMs: number;
  numResumes: number;
}

/** From the wire. */
export function pushOf(message: wire.Push | undefined): Push {
  const { state, receivedBytes, totalBytes, missing, issues, ...push } = message ?? wire.Push.create();
  return {
    pushId: push.pushId,
    state: wordOf(wire.PushState, state),
    weightVersion: push.weightVersion,
    receivedBytes: exactNumber(receivedBytes, "receivedBytes"),
    totalBytes: exactNumber(totalBytes, "totalBytes"),
    missing: missing.map(({ start, end }) => [exactNumber(start, "missing"), exactNumber(end, "missing")]),
    issues: issues.map(({ tensor, description }) => ({ tensor, description })),
    attempt: push.attempt,
    contentDigest: push.contentDigest,
  };
}

/** From the wire. */
export function pushResultOf(
  message: wire.PushWeightsResponse | wire.GetPushResponse | wire.CommitPushResponse,
): PushResult {
  return {
    push: pushOf(message.push),
    applied: message.applied && appliedOf(message.applied),
    state: stateOf(message.state),
  };
}

function appliedOf(message: wire.Applied): Applied {
  const { timings, paused, longestWait, discard, ...applied } = message;
  return {
    ...applied,
    recomputedTokens: applied.recomputedTokens,
    stepMs: Object.fromEntries(
      timings.map(({ step, duration }) => [step, duration === undefined ? 0 : millisecondsOf(duration)]),
    ),
    pausedMs: paused === undefined ? 0 : millisecondsOf(paused),
    longestWaitMs: longestWait && millisecondsOf(longestWait),
    discardMs: discard && millisecondsOf(discard),
  };
}
