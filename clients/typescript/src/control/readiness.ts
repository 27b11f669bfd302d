/** Waits until a daemon serves, by the health protocol of gRPC. */

import { DeadlineError, GenserveError, UnavailableError } from "../errors.js";
import type { Connection, ServerStreamMethod } from "../transport/connection.js";
import { CALL, checkOptions } from "../transport/options.js";
import { pause } from "../transport/pause.js";
import { type CallOptions, deadlineOf } from "../transport/timeouts.js";
import type { ControlCalls } from "./calls.js";

const READY_TIMEOUT_MS = 600_000;
const LAST_LOOK_MS = 1_000;
const NEXT_WATCH_MS = 200; // a proxy without a daemon refuses every call at once

/** Whether the whole server serves. By hand: two messages of one field each. */
const HEALTH_WATCH: ServerStreamMethod<undefined, boolean> = {
  path: "/grpc.health.v1.Health/Watch",
  requestStream: false,
  responseStream: true,
  requestSerialize: () => Buffer.alloc(0), // HealthCheckRequest{service: ""}
  responseDeserialize: (bytes) => bytes.equals(SERVING),
};
const SERVING = Buffer.from([0x08, 0x01]); // HealthCheckResponse{status: SERVING}

/** Returns when health says SERVING. */
export async function waitReady(connection: Connection, control: ControlCalls, options: CallOptions): Promise<void> {
  checkOptions(options, CALL);
  const timeoutMs = options.timeoutMs ?? READY_TIMEOUT_MS;
  const deadline = deadlineOf(timeoutMs);
  let answers = false;
  for (;;) {
    const watch = { timeoutMs: deadline - Date.now(), signal: options.signal, waitForReady: true };
    try {
      for await (const isServing of connection.responses(HEALTH_WATCH, undefined, watch)) {
        if (isServing) return;
        answers = true;
      }
    } catch (error) {
      if (error instanceof DeadlineError) {
        const seen = answers ? await whyNotReady(control, options) : "";
        const message = `no daemon was ready at ${connection.address} within ${timeoutMs / 1000} s${seen}`;
        throw new DeadlineError(message, { code: error.code, cause: error });
      }
      if (!(error instanceof UnavailableError)) throw error;
    }
    answers = false; // it went away
    await pause(Math.min(NEXT_WATCH_MS, deadline - Date.now()), options.signal);
  }
}

/** The reason why a daemon that answers does not serve; "" if unknown. */
async function whyNotReady(control: ControlCalls, { signal }: CallOptions): Promise<string> {
  try {
    const { phase, startup } = (await control.status({ timeoutMs: LAST_LOOK_MS, signal })).state;
    if (phase === "sleeping") return ": it is asleep; wake it up";
    return startup === undefined ? `: it is ${phase}` : `: it is ${phase}: ${startup.step}`;
  } catch (error) {
    if (error instanceof GenserveError) return "";
    throw error;
  }
}
