import { readFileSync } from "node:fs";
import { Metadata, status as Code } from "@grpc/grpc-js";
import { Client, ERROR_CLASSES, GenserveError, PermissionDeniedError, UnavailableError } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import { errorOf } from "../src/transport/status.js";
import { ScriptedDaemon } from "./scripted-daemon.js";

const page = readFileSync(new URL("../../../docs/errors.md", import.meta.url), "utf8");
const rows = [...page.matchAll(/^\| ([A-Z_]+) \| `(\w+)` \| ([A-Z_]+) \|/gm)].map(([, reason, name, code]) => ({
  reason,
  name,
  code,
}));
const classes = ERROR_CLASSES.map((errorClass) => ({ reason: errorClass.reason, name: errorClass.name }));

let daemon: ScriptedDaemon;
let client: Client;

beforeAll(async () => {
  daemon = await ScriptedDaemon.start();
  client = new Client(daemon.address);
});
afterAll(async () => {
  client.close();
  await daemon.stop();
});

test("there is a class for each reason that the documentation lists, and no other", () => {
  expect(rows.length).toBeGreaterThan(30);
  expect(new Set(classes.map((each) => JSON.stringify(each)))).toEqual(
    new Set(rows.map(({ reason, name }) => JSON.stringify({ reason, name }))),
  );
});

// A daemon does not tell what it has done wrong itself.
test.each(rows.filter(({ reason }) => reason !== "INTERNAL"))(
  "$reason of the daemon is thrown as $name",
  async ({ reason, name, code }) => {
    const error: unknown = await client
      .generate(`refuse ${String(reason)}`, { timeoutMs: 20_000 })
      .catch((thrown: unknown) => thrown);
    expect(error).toBeInstanceOf(GenserveError);
    expect(error).toMatchObject({ name, reason, code, message: "as told", metadata: { key: "1" }, retryAfterMs: 500 });
    expect((error as GenserveError).violations).toEqual([{ field: "text", description: "is refused" }]);
  },
);

test("a generation that is refused as unavailable is tried three times, and with another reason once", async () => {
  using fresh = new Client(daemon.proxy); // where calls were refused often, gRPC tries less
  for (const [reason, attempts] of [
    ["DRAINING", 3],
    ["LORA_NOT_FOUND", 1],
  ] as const) {
    const before = (await daemon.engine()).numRefused;
    await expect(fresh.generate(`refuse ${reason}`)).rejects.toMatchObject({ reason });
    expect((await daemon.engine()).numRefused - before).toBe(attempts);
  }
});

test("what nobody answers is UnavailableError, and names the address", async () => {
  using nobody = new Client("127.0.0.1:1");
  const calling = nobody.status({ timeoutMs: 20_000 });
  await expect(calling).rejects.toBeInstanceOf(UnavailableError);
  await expect(calling).rejects.toThrow(/^no daemon answers at 127\.0\.0\.1:1: connect ECONNREFUSED 127\.0\.0\.1:1$/);
});

test("a client with TLS is told that the daemon has none", async () => {
  using client = new Client(daemon.address, { tls: true, serverName: "daemon.test" });
  await expect(client.status({ timeoutMs: 20_000 })).rejects.toThrow(
    `no daemon answers at ${daemon.address}: wrong version number: it has no TLS, or is no daemon`,
  );
});

test("a call that the other side has cancelled is UnavailableError", () => {
  const cancelled = Object.assign(new Error(), {
    code: Code.CANCELLED,
    details: "CANCELLED",
    metadata: new Metadata(),
  });
  const error = errorOf(cancelled, "here:1");
  expect(error).toBeInstanceOf(UnavailableError);
  expect(error).toMatchObject({ code: "CANCELLED" });
  expect(error.message).toMatch(/^here:1 has ended the call/);
});

test("details of a proxy that are none hide neither code nor message", () => {
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from([0xff, 0xff]));
  const refused = Object.assign(new Error(), { code: Code.PERMISSION_DENIED, details: "not from here", metadata });
  const error = errorOf(refused, "here:1");
  expect(error).toBeInstanceOf(PermissionDeniedError);
  expect(error).toMatchObject({ code: "PERMISSION_DENIED", message: "not from here" });
});
