/** Options of a push, into its header. */

import { randomUUID } from "node:crypto";
import type { KvPolicy, PauseMode } from "../control/state.js";
import { InvalidFieldError } from "../errors.js";
import { checkCount, checkNumber, optionalDuration } from "../transport/fields.js";
import { CALL, checkOptions, checkText, type Kinds } from "../transport/options.js";
import type { CallOptions } from "../transport/timeouts.js";
import { valueOf, type Word } from "../transport/words.js";
import * as types from "../wire/genserve/v1/types.js";
import * as wire from "../wire/genserve/v1/weights.js";
import type { PushProgress } from "./push.js";

/** What a push does when every byte has arrived. "stage" and "prepare" wait for `commitPush`. */
export type PushAction = Word<typeof wire.PushAction>;

/** Whether generation runs or is paused while a version is prepared. */
export type PrepareMode = Word<typeof wire.PrepareMode>;

/** How weights that have come are applied. */
export interface ApplyOptions extends CallOptions {
  /** Refuse the push unless this version is served. */
  expectedVersion?: number | undefined;
  /** What the pause does to requests; default "keep". */
  pauseMode?: PauseMode | undefined;
  /** What becomes of the KV cache; default "recompute". */
  kvPolicy?: KvPolicy | undefined;
  /** Apply under this lease, and leave the engine paused. */
  pauseLeaseId?: string | undefined;
  /** How long applying may take; default 300 s. */
  applyTimeoutMs?: number | undefined;
  /** Default "running": generation stops only for the exchange. */
  prepareMode?: PrepareMode | undefined;
}

/** How bytes reach the daemon. */
export interface SendOptions extends CallOptions {
  /** Names the push: a repeat answers what the first one answered. Default: a new UUID. */
  pushId?: string | undefined;
  /** Bytes in a message; default 1 MiB. */
  chunkBytes?: number | undefined;
  /** Whether each chunk has its CRC32C; default true. */
  checksum?: boolean | undefined;
  /** Called after each chunk. */
  onProgress?: ((progress: PushProgress) => void) | undefined;
}

/** Every option of a push of an adapter. */
export interface LoraPushOptions extends SendOptions {
  /** Of the adapter: above 0, and above that of the one it replaces unless `force`. Default: the next one, or 1. */
  version?: number | undefined;
  /** Refuse the push unless this version is loaded under the name; 0 = none. */
  expectedVersion?: number | undefined;
  /** Whether the version may be one that is not above the loaded one. Default false. */
  force?: boolean | undefined;
}

/** Every option of a push. */
export interface PushOptions extends ApplyOptions, SendOptions {
  /** Version of the weights, above the served one unless `force`. */
  version: number;
  /** Default "apply". */
  action?: PushAction | undefined;
  /** Whether tensors of the checkpoint may be missing: they keep their present values. Default false. */
  partial?: boolean | undefined;
  /** Whether the version may be one that is not above the served one. Default false. */
  force?: boolean | undefined;
  /** How long bytes are kept that are incomplete or not committed; default 300 s. */
  stagingTtlMs?: number | undefined;
  /** How long a prepared push waits for `commitPush`; default 60 s. */
  preparedTtlMs?: number | undefined;
  /** SHA-256 of the contents, as weights.proto defines it: other contents are refused. */
  contentDigest?: string | undefined;
}

const MIB = 1 << 20;
const COMMIT_OPTIONS: Kinds<ApplyOptions> = {
  ...CALL,
  expectedVersion: "uint32",
  pauseMode: "words",
  kvPolicy: "words",
  pauseLeaseId: "string",
  applyTimeoutMs: "milliseconds",
  prepareMode: "words",
};
const SEND_OPTIONS: Kinds<SendOptions> = {
  ...CALL,
  pushId: "string",
  chunkBytes: "int32",
  checksum: "boolean",
  onProgress: "function",
};
const LORA_OPTIONS: Kinds<LoraPushOptions> = {
  ...SEND_OPTIONS,
  version: "uint32",
  expectedVersion: "uint32",
  force: "boolean",
};
const PUSH_OPTIONS: Kinds<PushOptions> = {
  ...COMMIT_OPTIONS,
  ...SEND_OPTIONS,
  version: "uint32",
  action: "words",
  partial: "boolean",
  force: "boolean",
  stagingTtlMs: "milliseconds",
  preparedTtlMs: "milliseconds",
  contentDigest: "string",
};

/** The header of a push, without tensors. Throws InvalidFieldError. */
export function pushHeader(options: PushOptions): wire.PushHeader {
  checkOptions(options, PUSH_OPTIONS);
  // eslint-disable-next-line @typescript-eslint/no-unnecessary-condition -- programs in JavaScript leave it out
  if (options.version === undefined) throw InvalidFieldError.of("version", "must be given");
  return {
    ...wire.PushHeader.create(),
    pushId: options.pushId ?? randomUUID(),
    weightVersion: checkNumber(options.version, "uint32", "version"),
    expectedVersion: options.expectedVersion,
    action: valueOf(wire.PushAction, options.action, "action"),
    apply: applyMessage(options),
    stagingTtl: optionalDuration(options.stagingTtlMs, "stagingTtlMs"),
    preparedTtl: optionalDuration(options.preparedTtlMs, "preparedTtlMs"),
    force: options.force ?? false,
    attempt: randomUUID(),
    numStreams: 1,
    contentDigest: options.contentDigest ?? "",
  };
}

/** The header of a push of an adapter, without tensors. Throws InvalidFieldError. */
export function adapterHeader(loraName: string, config: string, options: LoraPushOptions): wire.PushHeader {
  checkOptions(options, LORA_OPTIONS);
  // On the wire it would be the next one.
  if (options.version === 0) throw InvalidFieldError.of("version", "0 is not above 0: leave it out for the next one");
  return {
    ...wire.PushHeader.create(),
    pushId: options.pushId ?? randomUUID(),
    weightVersion: options.version ?? 0,
    expectedVersion: options.expectedVersion,
    force: options.force ?? false,
    lora: { loraName: checkText(loraName, "loraName"), config },
    attempt: randomUUID(),
    numStreams: 1,
  };
}

/** The request that applies a staged push. Throws InvalidFieldError. */
export function commitRequest(pushId: string, options: ApplyOptions): wire.CommitPushRequest {
  checkOptions(options, COMMIT_OPTIONS);
  return {
    pushId: checkText(pushId, "pushId"),
    apply: applyMessage(options),
    expectedVersion: options.expectedVersion,
  };
}

/** Bytes in a message. Throws InvalidFieldError. */
export function chunkBytesOf(options: { chunkBytes?: number | undefined }): number {
  return options.chunkBytes === undefined ? MIB : checkCount(options.chunkBytes, "chunkBytes");
}

function applyMessage(options: ApplyOptions): wire.ApplyOptions {
  return {
    pauseMode: valueOf(types.PauseMode, options.pauseMode, "pauseMode"),
    kvPolicy: valueOf(types.KvPolicy, options.kvPolicy, "kvPolicy"),
    pauseLeaseId: options.pauseLeaseId ?? "",
    timeout: optionalDuration(options.applyTimeoutMs, "applyTimeoutMs"),
    prepareMode: valueOf(wire.PrepareMode, options.prepareMode, "prepareMode"),
  };
}
