// Generated from protos/genserve/v1/*.json by scripts/generate; never edited.

/** What gRPC is given: the retries. */
export const SERVICE_CONFIG =
  "{\"methodConfig\":[{\"name\":[{\"service\":\"genserve.v1.GenerationService\",\"method\":\"Tokenize\"},{\"service\":\"genserve.v1.GenerationService\",\"method\":\"Detokenize\"},{\"service\":\"genserve.v1.WeightService\",\"method\":\"GetPush\"},{\"service\":\"genserve.v1.WeightService\",\"method\":\"GetWeights\"},{\"service\":\"genserve.v1.ControlService\",\"method\":\"GetStatus\"},{\"service\":\"genserve.v1.ControlService\",\"method\":\"GetServerInfo\"},{\"service\":\"genserve.v1.ControlService\",\"method\":\"ListLoras\"},{\"service\":\"genserve.v1.ControlService\",\"method\":\"RenewPause\"},{\"service\":\"genserve.v1.FleetService\",\"method\":\"ListReplicas\"},{\"service\":\"genserve.v1.GenerationService\",\"method\":\"Generate\"}],\"retryPolicy\":{\"maxAttempts\":3,\"initialBackoff\":\"0.2s\",\"maxBackoff\":\"2s\",\"backoffMultiplier\":3,\"retryableStatusCodes\":[\"UNAVAILABLE\"]}}],\"retryThrottling\":{\"maxTokens\":100,\"tokenRatio\":0.1}}";

/** Deadlines of calls that ask for none; a service has those of its other methods. */
export const DEFAULT_TIMEOUTS_MS = {
  "genserve.v1.GenerationService": 30000,
  "genserve.v1.WeightService": 30000,
  "genserve.v1.ControlService": 30000,
  "genserve.v1.FleetService": 30000,
  "genserve.v1.GenerationService/Tokenize": 30000,
  "genserve.v1.GenerationService/Detokenize": 30000,
  "genserve.v1.WeightService/GetPush": 30000,
  "genserve.v1.WeightService/GetWeights": 30000,
  "genserve.v1.ControlService/GetStatus": 30000,
  "genserve.v1.ControlService/GetServerInfo": 30000,
  "genserve.v1.ControlService/ListLoras": 30000,
  "genserve.v1.ControlService/RenewPause": 30000,
  "genserve.v1.FleetService/ListReplicas": 30000,
  "genserve.v1.GenerationService/Generate": 600000,
  "genserve.v1.GenerationService/GenerateMany": 600000,
  "genserve.v1.WeightService/PushWeights": 600000,
  "genserve.v1.WeightService/LoadWeights": 600000,
  "genserve.v1.WeightService/CommitPush": 600000,
  "genserve.v1.WeightService/PullWeights": 600000,
  "genserve.v1.WeightService/InitWeightTransfer": 360000,
  "genserve.v1.WeightService/UpdateWeights": 360000,
  "genserve.v1.WeightService/FinishWeightUpdate": 360000,
  "genserve.v1.ControlService/WakeUp": 300000,
  "genserve.v1.FleetService/DrainReplica": 300000,
  "genserve.v1.WeightService/StartWeightUpdate": 120000,
  "genserve.v1.ControlService/Pause": 70000,
  "genserve.v1.ControlService/Sleep": 70000,
  "genserve.v1.ControlService/LoadLora": 70000,
  "genserve.v1.ControlService/WatchStatus": Infinity,
  "genserve.v1.FleetService/WatchReplicas": Infinity,
} as const;
