/** A client of genserve: streaming generation and weight pushes for RL over gRPC. */

export { InterceptingCall, type Interceptor } from "@grpc/grpc-js";

export { Client } from "./client.js";
export * from "./errors.js";

export type { PauseOptions, SleepOptions, SleepTag, WatchOptions } from "./control/calls.js";
export type { HeldPause } from "./control/held-pause.js";
export type { Limits, ModelMemory, Parallelism, Protection, ServerInfo } from "./control/server-info.js";
export type {
  EngineState,
  KvPolicy,
  Load,
  PauseLease,
  PauseMode,
  PauseResult,
  Phase,
  PushInFlight,
  PushState,
  ResumeResult,
  Startup,
  Status,
} from "./control/state.js";
export type { AbortResult, CompletedGeneration, GenerateManyOptions } from "./generation/calls.js";
export type { ManyItem, ManyStream, SubmitOptions } from "./generation/many-stream.js";
export type * from "./generation/options.js";
export {
  alternativesAt,
  type Delta,
  type Finish,
  type FinishReason,
  type GeneratedSequence,
  Generation,
  type Logprobs,
  type PromptInfo,
  type SequenceDelta,
  type Usage,
  type WeightSpan,
} from "./generation/results.js";
export type { ConnectionOptions, Pem } from "./transport/settings.js";
export type { CallOptions, Timeouts } from "./transport/timeouts.js";
export type { ServedTensor, ServedWeights, WeightDigest } from "./weights/calls.js";
export type { PulledTensor, PulledWeights, PullOptions } from "./weights/download.js";
export type { Dtype } from "./weights/dtypes.js";
export type { Lora, LoraAdapter } from "./weights/lora.js";
export type {
  ApplyOptions,
  LoraPushOptions,
  PrepareMode,
  PushAction,
  PushOptions,
  SendOptions,
} from "./weights/options.js";
export type { Applied, Push, PushProgress, PushResult } from "./weights/push.js";
export type { ByteRange } from "./weights/ranges.js";
export { CheckpointFileError } from "./weights/safetensors.js";
export type { Tensor } from "./weights/sources.js";
