/** The calls of WeightService. */

import { type EngineState, stateOf } from "../control/state.js";
import type { Connection } from "../transport/connection.js";
import { exactNumber } from "../transport/fields.js";
import { CALL, checkOptions, checkText } from "../transport/options.js";
import { type CallOptions, limited } from "../transport/timeouts.js";
import { type GetWeightsResponse, WeightServiceService } from "../wire/genserve/v1/weights.js";
import { Checkpoint } from "./checkpoint.js";
import { Download, type PulledWeights, type PullOptions } from "./download.js";
import { type ApplyOptions, commitRequest, pushHeader, type PushOptions } from "./options.js";
import { type Push, pushOf, type PushResult, pushResultOf } from "./push.js";
import { memorySources, type Tensor, type TensorSource } from "./sources.js";
import { upload } from "./upload.js";

/** A tensor that a push must bring; `dtype` is safetensors' name. */
export interface ServedTensor {
  name: string;
  dtype: string;
  shape: number[];
}

/** SHA-256, in hex, of one live tensor on one rank. */
export interface WeightDigest {
  rank: string;
  /** vLLM's name, where several tensors of the checkpoint may be one. */
  name: string;
  sha256: string;
}

/** The weights that are served. */
export interface ServedWeights {
  /** 0 before the first push. */
  weightVersion: number;
  tensors: ServedTensor[];
  totalBytes: number;
  /** Of the live weights, if they were asked for. */
  digests: WeightDigest[];
  /** Whether the daemon keeps the bytes of this version: partial pushes need them. */
  resident: boolean;
  /** The push that brought them; "" if none did. */
  pushId: string;
  /** SHA-256 of their contents; "" if it is not known. */
  contentDigest: string;
  state: EngineState;
}

/** Pushes and pulls of weights. */
export class WeightCalls {
  readonly #connection: Connection;

  constructor(connection: Connection) {
    this.#connection = connection;
  }

  async pushCheckpoint(path: string, options: PushOptions): Promise<PushResult> {
    const checkpoint = await Checkpoint.open(path);
    try {
      return await this.#push(checkpoint.tensors, options);
    } finally {
      await checkpoint[Symbol.asyncDispose]();
    }
  }

  async pushTensors(tensors: Readonly<Record<string, Tensor>>, options: PushOptions): Promise<PushResult> {
    return this.#push(memorySources(tensors), options);
  }

  async pullWeights(options: PullOptions): Promise<PulledWeights> {
    return new Download(this.#connection, options).run();
  }

  async getPush(pushId: string, options: CallOptions): Promise<PushResult> {
    checkOptions(options, CALL);
    const request = { pushId: checkText(pushId, "pushId") };
    return pushResultOf(await this.#connection.unary(WeightServiceService.getPush, request, options));
  }

  async commitPush(pushId: string, options: ApplyOptions): Promise<PushResult> {
    const timed = limited(options, this.#connection.timeouts.pushMs);
    const request = commitRequest(pushId, options);
    return pushResultOf(await this.#connection.unary(WeightServiceService.commitPush, request, timed));
  }

  async discardPush(pushId: string, options: CallOptions & { force?: boolean | undefined }): Promise<Push> {
    checkOptions(options, { ...CALL, force: "boolean" });
    const request = { pushId: checkText(pushId, "pushId"), force: options.force ?? false };
    const response = await this.#connection.unary(WeightServiceService.discardPush, request, options);
    return pushOf(response.push);
  }

  async getWeights(options: CallOptions & { includeDigests?: boolean | undefined }): Promise<ServedWeights> {
    checkOptions(options, { ...CALL, includeDigests: "boolean" });
    const request = { includeDigests: options.includeDigests ?? false, omitManifest: false };
    return servedOf(await this.#connection.unary(WeightServiceService.getWeights, request, options));
  }

  async #push(sources: readonly TensorSource[], options: PushOptions): Promise<PushResult> {
    return upload(this.#connection, pushHeader(options), sources, options);
  }
}

function servedOf(message: GetWeightsResponse): ServedWeights {
  const { weightVersion, manifest, digests, resident, pushId, contentDigest, state } = message;
  return {
    weightVersion,
    tensors: (manifest?.tensors ?? []).map(({ name, dtype, shape }) => ({
      name,
      dtype,
      shape: shape.map((size) => exactNumber(size, `the shape of ${name}`)),
    })),
    totalBytes: exactNumber(manifest?.totalBytes ?? 0n, "totalBytes"),
    digests,
    resident,
    pushId,
    contentDigest,
    state: stateOf(state),
  };
}
