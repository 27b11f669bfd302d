/** One class for each reason of the wire contract; docs/errors.md of the project describes them. */

/** What is wrong with one field of a request. `field` is its path in the message. */
export interface FieldViolation {
  readonly field: string;
  readonly description: string;
}

/** A reason that has a class. */
export type KnownReason = "INTERNAL" | (typeof SUBCLASSES)[number]["reason"];

/** Why a call failed. A newer daemon may have reasons that are not known here. */
export type ErrorReason = KnownReason | (string & {});

/** The properties of an error besides its message. */
export interface ErrorDetails {
  /** Default: the reason of the class. */
  reason?: ErrorReason;
  /** gRPC's name of the status code; "" for an error that the client itself has found. */
  code?: string;
  violations?: readonly FieldViolation[];
  retryAfterMs?: number | undefined;
  metadata?: Readonly<Record<string, string>>;
  cause?: unknown;
}

/** The properties of an error as another one can have them. */
export function detailsOf({ reason, code, violations, retryAfterMs, metadata }: GenserveError): ErrorDetails {
  return { reason, code, violations, retryAfterMs, metadata };
}

/**
 * A fault in the daemon. Its log has the cause under the `error_id` of the error's metadata.
 *
 * Base class of all errors that have a reason. Read `reason`, `violations`, `retryAfterMs` and `metadata` in a program:
 * messages are for people and change.
 */
export class GenserveError extends Error {
  static readonly reason: string = "INTERNAL";

  /** Why it failed, as in `google.rpc.ErrorInfo`. */
  readonly reason: ErrorReason;
  /** gRPC's name of the status code, such as "UNAVAILABLE"; "" for an error that the client itself has found. */
  readonly code: string;
  /** The wrong fields or tensors. */
  readonly violations: readonly FieldViolation[];
  /** How long to wait before a retry, where a retry helps. */
  readonly retryAfterMs: number | undefined;
  /** Values for programs. */
  readonly metadata: Readonly<Record<string, string>>;

  constructor(message: string, details: ErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.name = new.target.name;
    this.reason = details.reason ?? new.target.reason;
    this.code = details.code ?? "";
    this.violations = details.violations ?? [];
    this.retryAfterMs = details.retryAfterMs;
    this.metadata = details.metadata ?? {};
  }
}

/** A field of the request has a value that the daemon does not accept. */
export class InvalidFieldError extends GenserveError {
  static override readonly reason = "INVALID_FIELD";

  /** The error for one field, which is named by its path. */
  static of(field: string, description: string): InvalidFieldError {
    return new InvalidFieldError(`${field}: ${description}`, { violations: [{ field, description }] });
  }
}

/** The prompt leaves no room for output in the context of the model. */
export class PromptTooLongError extends GenserveError {
  static override readonly reason = "PROMPT_TOO_LONG";
}

/** The manifest does not match the served checkpoint. The violations name the tensors. */
export class ManifestMismatchError extends GenserveError {
  static override readonly reason = "MANIFEST_MISMATCH";
}

/** A chunk lies outside the byte space of the manifest. */
export class ChunkOutOfRangeError extends GenserveError {
  static override readonly reason = "CHUNK_OUT_OF_RANGE";
}

/** No adapter with this name is loaded. */
export class LoraNotFoundError extends GenserveError {
  static override readonly reason = "LORA_NOT_FOUND";
}

/** No push with this id exists. It may have expired. */
export class PushNotFoundError extends GenserveError {
  static override readonly reason = "PUSH_NOT_FOUND";
}

/** No weight update with this id is open. An update that expires is undone. */
export class UpdateNotFoundError extends GenserveError {
  static override readonly reason = "UPDATE_NOT_FOUND";
}

/** A request with this id is already running. */
export class RequestIdInUseError extends GenserveError {
  static override readonly reason = "REQUEST_ID_IN_USE";
}

/** The push id belongs to a push with another version, manifest or bytes. */
export class PushConflictError extends GenserveError {
  static override readonly reason = "PUSH_CONFLICT";
}

/** The served version, or that of the adapter, is not the one that the request asks for. */
export class WeightVersionMismatchError extends GenserveError {
  static override readonly reason = "WEIGHT_VERSION_MISMATCH";
}

/** The pushed version is not above the served version, or that of an adapter not above the loaded one. */
export class VersionNotNewerError extends GenserveError {
  static override readonly reason = "VERSION_NOT_NEWER";
}

/** The pause lease is unknown or has expired. */
export class PauseLeaseLostError extends GenserveError {
  static override readonly reason = "PAUSE_LEASE_LOST";
}

/** The engine sleeps: it has released its memory. */
export class EngineSleepingError extends GenserveError {
  static override readonly reason = "ENGINE_SLEEPING";
}

/** The daemon does not keep the bytes of the served version. Partial pushes and pulls need them. */
export class NotResidentError extends GenserveError {
  static override readonly reason = "WEIGHTS_NOT_RESIDENT";
}

/** The live weights may be inconsistent. Push a complete version or restart the daemon. */
export class EngineTaintedError extends GenserveError {
  static override readonly reason = "ENGINE_TAINTED";
}

/** The push ended before all bytes arrived. The daemon keeps those that arrived until `staging_ttl` ends. */
export class PushTruncatedError extends GenserveError {
  static override readonly reason = "PUSH_TRUNCATED";
}

/** Another push or weight update is in progress. The metadata names it. */
export class ApplyInProgressError extends GenserveError {
  static override readonly reason = "APPLY_IN_PROGRESS";
}

/** The push could not be applied. The previous version is served. */
export class PushRolledBackError extends GenserveError {
  static override readonly reason = "PUSH_ROLLED_BACK";
}

/** The bytes of a chunk do not match its CRC32C, or the contents of a push its `content_digest`. */
export class ChecksumMismatchError extends GenserveError {
  static override readonly reason = "CHECKSUM_MISMATCH";
}

/**
 * There is not enough memory to stage the push, or workers hold another prepared push. The metadata names
 * the pushes in the way.
 */
export class StagingFullError extends GenserveError {
  static override readonly reason = "STAGING_FULL";
}

/** Too many requests wait, or too many watch streams are open. */
export class QueueFullError extends GenserveError {
  static override readonly reason = "QUEUE_FULL";
}

/** A message is larger than the limit. */
export class MessageTooLargeError extends GenserveError {
  static override readonly reason = "MESSAGE_TOO_LARGE";
}

/** The callers of this role make more calls per second than the server allows them. */
export class RateLimitedError extends GenserveError {
  static override readonly reason = "RATE_LIMITED";
}

/** The daemon is starting or shutting down. */
export class DrainingError extends GenserveError {
  static override readonly reason = "DRAINING";
}

/** The engine has died. The daemon is about to exit. */
export class EngineDeadError extends GenserveError {
  static override readonly reason = "ENGINE_DEAD";
}

/** The daemon was started without a feature that this call needs, or has no such call. */
export class UnsupportedError extends GenserveError {
  static override readonly reason = "UNSUPPORTED";
}

/** No daemon answers, or the connection broke. Only the client raises this. */
export class UnavailableError extends GenserveError {
  static override readonly reason = "UNAVAILABLE";
}

/** No peer sent the requested version. The message gives the reason for each address. */
export class PeersFailedError extends GenserveError {
  static override readonly reason = "PEERS_FAILED";
}

/** No replica of the fleet may serve the request. The message says why. */
export class NoReplicaError extends GenserveError {
  static override readonly reason = "NO_REPLICA";
}

/** No replica with this address belongs to the fleet. */
export class ReplicaNotFoundError extends GenserveError {
  static override readonly reason = "REPLICA_NOT_FOUND";
}

/** Another router, which the metadata names as ``router_address``, manages the replica; or none does. */
export class FleetHeldError extends GenserveError {
  static override readonly reason = "FLEET_HELD";
}

/** No other replica has a version or adapter that was pushed to the fleet. It would be lost. */
export class LastReplicaError extends GenserveError {
  static override readonly reason = "LAST_REPLICA";
}

/** The replica of a fleet that ran the request is lost, after a part of the answer was delivered. */
export class ReplicaLostError extends GenserveError {
  static override readonly reason = "REPLICA_LOST";
}

/** A replica of a fleet could not take the push, so nothing was changed on any of them. */
export class FleetPushError extends GenserveError {
  static override readonly reason = "FLEET_PUSH_FAILED";
}

/** The call did not finish within its timeout. After a push, ``getPush`` reports its outcome. */
export class DeadlineError extends GenserveError {
  static override readonly reason = "DEADLINE_EXCEEDED";
}

/** The call has no valid credentials. */
export class UnauthenticatedError extends GenserveError {
  static override readonly reason = "UNAUTHENTICATED";
}

/** The credentials do not allow this call. */
export class PermissionDeniedError extends GenserveError {
  static override readonly reason = "PERMISSION_DENIED";
}

/**
 * The client was closed before or during the call. It has no reason on the wire: a program that retries the refusals of
 * a daemon must not retry this.
 */
export class ClientClosedError extends Error {
  constructor(message: string) {
    super(message);
    this.name = new.target.name;
  }
}

/** A stream of `streamMany` takes no more requests: `done` was called, or the daemon has ended it without an error. */
export class StreamOverError extends Error {
  constructor() {
    super("the stream takes no more requests");
    this.name = new.target.name;
  }
}

const SUBCLASSES = [
  InvalidFieldError,
  PromptTooLongError,
  ManifestMismatchError,
  ChunkOutOfRangeError,
  LoraNotFoundError,
  PushNotFoundError,
  UpdateNotFoundError,
  RequestIdInUseError,
  PushConflictError,
  WeightVersionMismatchError,
  VersionNotNewerError,
  PauseLeaseLostError,
  EngineSleepingError,
  NotResidentError,
  EngineTaintedError,
  PushTruncatedError,
  ApplyInProgressError,
  PushRolledBackError,
  ChecksumMismatchError,
  StagingFullError,
  QueueFullError,
  MessageTooLargeError,
  RateLimitedError,
  DrainingError,
  EngineDeadError,
  UnsupportedError,
  UnavailableError,
  PeersFailedError,
  NoReplicaError,
  ReplicaNotFoundError,
  FleetHeldError,
  LastReplicaError,
  ReplicaLostError,
  FleetPushError,
  DeadlineError,
  UnauthenticatedError,
  PermissionDeniedError,
] as const;

/** Every class of an error that a daemon gives a reason for. */
export const ERROR_CLASSES: readonly (typeof GenserveError)[] = [GenserveError, ...SUBCLASSES];
