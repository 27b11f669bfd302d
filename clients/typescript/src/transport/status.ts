/** Turns the status of a failed call into a typed error, by the daemon's reason, never by its message. */

import { type ServiceError, status as Code } from "@grpc/grpc-js";
import {
  DeadlineError,
  ERROR_CLASSES,
  type FieldViolation,
  GenserveError,
  MessageTooLargeError,
  PermissionDeniedError,
  UnauthenticatedError,
  UnavailableError,
  UnsupportedError,
} from "../errors.js";
import { BadRequest, ErrorInfo, RetryInfo } from "../wire/google/rpc/error_details.js";
import { Status } from "../wire/google/rpc/status.js";
import { millisecondsOf } from "./fields.js";

const DOMAIN = "genserve";
const DETAILS_KEY = "grpc-status-details-bin";
/** The part of a type's URL that says which type it is. */
const TYPE_NAME = /\/google\.rpc\.(\w+)$/;

const CLASS_BY_REASON = new Map(ERROR_CLASSES.map((errorClass) => [errorClass.reason, errorClass]));

/** For codes of gRPC itself, which have no reason of genserve. */
const CLASS_BY_CODE = new Map<number, typeof GenserveError>([
  [Code.CANCELLED, UnavailableError], // by the other side: what is cancelled here ends with the reason of its signal
  [Code.DEADLINE_EXCEEDED, DeadlineError],
  [Code.PERMISSION_DENIED, PermissionDeniedError],
  [Code.RESOURCE_EXHAUSTED, MessageTooLargeError],
  [Code.UNAUTHENTICATED, UnauthenticatedError],
  [Code.UNAVAILABLE, UnavailableError],
  [Code.UNIMPLEMENTED, UnsupportedError],
]);

/** What gRPC says of a call whose connection ends: its server may be gone, or be one of several processes. */
const BROKEN = /Connection dropped|ECONNRESET|EPIPE|GOAWAY|socket hang up|Received RST_STREAM/i;

/** How grpc-js wraps why it has no connection: the name of the error's class before it, and an empty note after it. */
const UNCONNECTED =
  /^No connection established\. Last error: (?:\w*Error(?: \[\w+\])?: )?([^]*?)\.? Resolution note: [^]*$/;
/** How OpenSSL wraps why a handshake failed: codes and functions before it, the line of a file after it. */
const OF_OPENSSL = /^[0-9A-F]+:error:[0-9A-F]+:[^:]*:[^:]*:([^:]+):[^]*$/;
/** When grpc-js says what it says. */
const TIME = / \(\d{4}-\d\d-\d\dT[\d:.]+Z\)$/;

/** What grpc-js and gRPC servers say of a call that ended at its deadline. */
const LATE = /^deadline.exceeded/i;

/** The typed error for a failed call to `address`. */
export function errorOf(error: ServiceError, address: string): GenserveError {
  const details = error.metadata.get(DETAILS_KEY)[0];
  const status = details instanceof Buffer ? decoded(Status, details) : undefined;
  return typed(error.code, error.details, status, address);
}

/** The same for a status that came in a message. */
export function errorOfStatus(status: Status, address: string): GenserveError {
  return typed(status.code, status.message, status, address);
}

function typed(code: number, message: string, status: Status | undefined, address: string): GenserveError {
  let info: ErrorInfo | undefined;
  const violations: FieldViolation[] = [];
  let retryAfterMs: number | undefined;
  for (const { typeUrl, value } of status?.details ?? []) {
    switch (TYPE_NAME.exec(typeUrl)?.[1]) {
      case "ErrorInfo": {
        const candidate = decoded(ErrorInfo, value);
        if (candidate?.domain === DOMAIN) info = candidate;
        break;
      }
      case "BadRequest":
        for (const { field, description } of decoded(BadRequest, value)?.fieldViolations ?? []) {
          violations.push({ field, description });
        }
        break;
      case "RetryInfo": {
        const retryDelay = decoded(RetryInfo, value)?.retryDelay;
        retryAfterMs = retryDelay && millisecondsOf(retryDelay);
      }
    }
  }
  const codeName = Code[code] ?? `code ${code}`;
  if (info !== undefined) {
    const errorClass = CLASS_BY_REASON.get(info.reason) ?? GenserveError;
    return new errorClass(message || codeName, {
      reason: info.reason,
      code: codeName,
      violations,
      retryAfterMs,
      metadata: info.metadata,
    });
  }
  const errorClass = CLASS_BY_CODE.get(code) ?? GenserveError;
  return new errorClass(explained(code, message || codeName, address), { code: codeName, violations, retryAfterMs });
}

/** gRPC's own words, with what was called. */
function explained(code: number, message: string, address: string): string {
  switch (Code[code]) {
    case "CANCELLED":
      return `${address} has ended the call, or its connection broke: ${message}`;
    case "UNAVAILABLE":
      return BROKEN.test(message)
        ? `the connection to ${address} broke: ${message}`
        : `no daemon answers at ${address}: ${whyUnconnected(message)}`;
    case "DEADLINE_EXCEEDED":
      return LATE.test(message) ? `the call to ${address} did not finish within its timeout` : message;
    case "UNIMPLEMENTED":
      return `what answers at ${address} does not have this call: ${message}`;
    default:
      return message;
  }
}

/** Why there is no connection, without what grpc-js and OpenSSL wrap it in. */
function whyUnconnected(message: string): string {
  const why = (UNCONNECTED.exec(message)?.[1] ?? message).replace(OF_OPENSSL, "$1").replace(TIME, "");
  switch (why) {
    case "wrong version number":
      return `${why}: it has no TLS, or is no daemon`;
    case "Failed to connect":
      return "the connection was closed before it was used: it may need TLS, or a certificate";
    default:
      return why;
  }
}

/** Undefined for bytes that are no such message, of a proxy: the code and the message still say what failed. */
function decoded<Message>(type: { decode(bytes: Uint8Array): Message }, bytes: Uint8Array): Message | undefined {
  try {
    return type.decode(bytes);
  } catch {
    return undefined;
  }
}
