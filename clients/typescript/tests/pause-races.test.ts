/** Pauses whose answers come late, or not at all. */

import { Server, type sendUnaryData, type ServerUnaryCall, type UntypedServiceImplementation } from "@grpc/grpc-js";
import { Client, PauseLeaseLostError } from "genserve";
import { expect, test } from "vitest";
import {
  ControlServiceService,
  GetStatusResponse,
  type PauseRequest,
  PauseResponse,
  type ResumeRequest,
  ResumeResponse,
} from "../src/wire/genserve/v1/control.js";
import { Clock } from "./clock.js";
import { listening, serve } from "./raw-server.js";

type Call<Request, Response> = (call: ServerUnaryCall<Request, Response>, answer: sendUnaryData<Response>) => void;

/** Uses a client of a server with these calls. */
async function withServer(calls: UntypedServiceImplementation, use: (client: Client) => Promise<void>): Promise<void> {
  const server = new Server();
  serve(server, ControlServiceService, calls);
  using client = new Client(await listening(server));
  try {
    await use(client);
  } finally {
    server.forceShutdown();
  }
}

const granted = PauseResponse.fromPartial({ lease: { leaseId: "granted" } });

test("a lease whose renewals are not answered is lost when it ends, and not later", async () => {
  const ttlMs = 60_000;
  let numRenewals = 0;
  const pause: Call<PauseRequest, PauseResponse> = (_, answer) => {
    answer(null, granted);
  };
  const resume: Call<ResumeRequest, ResumeResponse> = (_, answer) => {
    answer(null, ResumeResponse.fromPartial({ leaseExpired: true }));
  };
  const renewPause = () => {
    numRenewals++;
  };
  await withServer({ pause, resume, renewPause }, async (client) => {
    using clock = new Clock();
    const working = client.paused(
      async ({ signal }) => {
        await clock.advance(ttlMs - 1_000);
        expect(signal.aborted).toBe(false);
        expect(numRenewals).toBe(1); // which has had its third of the time
        await clock.advance(2_000);
        expect(signal.aborted).toBe(true);
      },
      { ttlMs },
    );
    await expect(working).rejects.toBeInstanceOf(PauseLeaseLostError);
  });
});

/** What a daemon was asked after a pause was aborted that it had granted, or not. */
async function afterAbortedPause(isGranted: boolean): Promise<string[]> {
  const asked: string[] = [];
  const requestIds = new Set<string>();
  const controller = new AbortController();
  const pause: Call<PauseRequest, PauseResponse> = ({ request: { requestId, mode, ttl } }, answer) => {
    asked.push(`pause ${mode}, ${ttl?.seconds} s`);
    if (requestIds.has(requestId)) answer(null, granted);
    else controller.abort(); // before an answer
    requestIds.add(requestId);
  };
  const getStatus: Call<object, GetStatusResponse> = (_, answer) => {
    asked.push("status");
    answer(null, GetStatusResponse.fromPartial({ state: { pauses: isGranted ? [{ leaseId: "granted" }] : [] } }));
  };
  const resume: Call<ResumeRequest, ResumeResponse> = ({ request: { leaseId } }, answer) => {
    asked.push(`resume ${leaseId}`);
    answer(null, ResumeResponse.create());
  };
  await withServer({ pause, getStatus, resume }, async (client) => {
    const pausing = client.pause({ mode: "abort", ttlMs: 600_000, signal: controller.signal });
    await expect(pausing).rejects.toMatchObject({ name: "AbortError" });
  });
  return asked;
}

test("a pause that is aborted while its answer comes leaves no lease, and ends no requests twice", async () => {
  const [abort, keep] = ["pause 3, 600 s", "pause 1, 2 s"]; // should that pause, nobody may be there to end it
  expect(await afterAbortedPause(true)).toEqual([abort, "status", keep, "resume granted"]);
  expect(await afterAbortedPause(false)).toEqual([abort, "status"]);
});
