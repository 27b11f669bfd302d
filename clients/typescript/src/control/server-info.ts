/** What a daemon serves and can do. */

import { exactNumber, millisecondsOf } from "../transport/fields.js";
import * as wire from "../wire/genserve/v1/control.js";
import { type EngineState, stateOf } from "./state.js";

/** Limits of requests, in tokens, bytes and calls. */
export interface Limits extends Omit<wire.Limits, "maxStagingBytes" | "requestRates" | "writeTimeout"> {
  maxStagingBytes: number;
  /** Calls per second of all callers of a role together, by role. */
  requestRates: Record<string, number>;
  /** Time that a client may take to read a message of tokens, after which its stream ends; Infinity is any. */
  writeTimeoutMs: number;
}

/** Memory that the loaded model reaches, of all ranks together, in bytes. */
export type ModelMemory = { [Name in keyof wire.ModelMemory]: number };

/** How the model is spread. */
export type Parallelism = Readonly<wire.Parallelism>;

/** What protects the ports. Without `roles` everybody who connects may do everything. */
export type Protection = Readonly<wire.Protection>;

type Converted = "limits" | "versions" | "state" | "reservedDeviceBytes" | "pinnedHostBytes" | "modelMemory";

/** What the daemon serves and can do. */
export interface ServerInfo extends Omit<wire.GetServerInfoResponse, Converted | "parallelism" | "protection"> {
  limits: Limits;
  parallelism: Parallelism;
  protection: Protection;
  /** By component: genserve, vllm, torch, grpc and python. */
  versions: Record<string, string>;
  reservedDeviceBytes: number;
  pinnedHostBytes: number;
  modelMemory: ModelMemory;
  state: EngineState;
}

/** From the wire. */
export function serverInfoOf(message: wire.GetServerInfoResponse): ServerInfo {
  const memory = message.modelMemory ?? wire.ModelMemory.create();
  return {
    ...message,
    limits: limitsOf(message.limits ?? wire.Limits.create()),
    parallelism: message.parallelism ?? wire.Parallelism.create(),
    protection: message.protection ?? wire.Protection.create(),
    versions: Object.fromEntries(message.versions.map(({ component, version }) => [component, version])),
    reservedDeviceBytes: exactNumber(message.reservedDeviceBytes, "reservedDeviceBytes"),
    pinnedHostBytes: exactNumber(message.pinnedHostBytes, "pinnedHostBytes"),
    modelMemory: {
      reachableBytes: exactNumber(memory.reachableBytes, "reachableBytes"),
      exchangedBytes: exactNumber(memory.exchangedBytes, "exchangedBytes"),
      kvCacheBytes: exactNumber(memory.kvCacheBytes, "kvCacheBytes"),
      constantBytes: exactNumber(memory.constantBytes, "constantBytes"),
      hiddenBytes: exactNumber(memory.hiddenBytes, "hiddenBytes"),
    },
    state: stateOf(message.state),
  };
}

function limitsOf(message: wire.Limits): Limits {
  const { writeTimeout, ...limits } = message;
  return {
    ...limits,
    writeTimeoutMs: writeTimeout === undefined ? Infinity : millisecondsOf(writeTimeout),
    maxStagingBytes: exactNumber(message.maxStagingBytes, "maxStagingBytes"),
    requestRates: Object.fromEntries(message.requestRates.map((each) => [each.role, each.callsPerSecond])),
  };
}
