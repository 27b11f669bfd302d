/** LoRA adapters: pushed from here, or loaded from the disk of the daemon, and used by `loraName`. */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import type { Connection } from "../transport/connection.js";
import { exactNumber, waitOf } from "../transport/fields.js";
import { CALL, checkOptions, checkText } from "../transport/options.js";
import type { CallOptions } from "../transport/timeouts.js";
import { ControlServiceService, type Lora as LoraMessage } from "../wire/genserve/v1/control.js";
import { Checkpoint } from "./checkpoint.js";
import { adapterHeader, type LoraPushOptions } from "./options.js";
import type { PushResult } from "./push.js";
import { parseObject } from "./safetensors.js";
import { memorySources, type Tensor, type TensorSource } from "./sources.js";
import { upload } from "./upload.js";

/** An adapter in memory. */
export interface LoraAdapter {
  /** By PEFT's names: base_model.model.(module).lora_A.weight and .lora_B.weight. */
  tensors: Readonly<Record<string, Tensor>>;
  /** PEFT's configuration, of which r, lora_alpha and target_modules are needed. */
  config: Readonly<Record<string, unknown>>;
}

/** An adapter that requests can use. */
export interface Lora {
  loraName: string;
  rank: number;
  /** Of its tensors on the host. */
  sizeBytes: number;
  /** The path that was loaded, or "push " and the id of the push. */
  source: string;
  loadTime: Date | undefined;
  /** Requests that use it now. */
  runningRequests: number;
  /** What `loraVersion` of the spans of its requests names. */
  version: number;
}

const CONFIG_FILE = "adapter_config.json";
const LOAD_TIMEOUT_MS = 60_000;

/** LoRA adapters of a daemon that was started with --enable-lora. */
export class LoraCalls {
  readonly #connection: Connection;

  constructor(connection: Connection) {
    this.#connection = connection;
  }

  async push(loraName: string, adapter: string | LoraAdapter, options: LoraPushOptions): Promise<PushResult> {
    if (typeof adapter !== "string") {
      return this.#send(loraName, memorySources(adapter.tensors), JSON.stringify(adapter.config), options);
    }
    const path = join(adapter, CONFIG_FILE);
    const config = await readFile(path, "utf8");
    parseObject(path, config);
    const checkpoint = await Checkpoint.open(adapter);
    try {
      return await this.#send(loraName, checkpoint.tensors, config, options);
    } finally {
      await checkpoint[Symbol.asyncDispose]();
    }
  }

  async load(loraName: string, path: string, options: CallOptions): Promise<Lora> {
    checkOptions(options, CALL);
    const timeoutMs = options.timeoutMs ?? LOAD_TIMEOUT_MS;
    const names = { loraName: checkText(loraName, "loraName"), path: checkText(path, "path") };
    const request = { ...names, timeout: waitOf(timeoutMs) };
    const { lora } = await this.#connection.unary(ControlServiceService.loadLora, request, {
      timeoutMs: timeoutMs + this.#connection.timeouts.pauseSlackMs,
      signal: options.signal,
    });
    return loraOf(lora);
  }

  async unload(loraName: string, options: CallOptions): Promise<Lora> {
    checkOptions(options, CALL);
    const request = { loraName: checkText(loraName, "loraName") };
    return loraOf((await this.#connection.unary(ControlServiceService.unloadLora, request, options)).lora);
  }

  async list(options: CallOptions): Promise<Lora[]> {
    checkOptions(options, CALL);
    const { loras } = await this.#connection.unary(ControlServiceService.listLoras, {}, options);
    return loras.map(loraOf);
  }

  #send(
    loraName: string,
    sources: readonly TensorSource[],
    config: string,
    options: LoraPushOptions,
  ): Promise<PushResult> {
    return upload(this.#connection, adapterHeader(loraName, config, options), sources, options);
  }
}

function loraOf(message: LoraMessage | undefined): Lora {
  const { loraName = "", rank = 0, sizeBytes = 0n, source = "", loadTime, runningRequests = 0 } = message ?? {};
  const version = message?.loraVersion ?? 0;
  return { loraName, rank, sizeBytes: exactNumber(sizeBytes, "sizeBytes"), source, loadTime, runningRequests, version };
}
