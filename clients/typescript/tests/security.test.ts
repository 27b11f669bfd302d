import { readFileSync } from "node:fs";
import {
  Client,
  type ConnectionOptions,
  PermissionDeniedError,
  UnauthenticatedError,
  UnavailableError,
} from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import { digestsOf, randomTensors } from "./checkpoints.js";
import { type Credentials, ScriptedDaemon } from "./scripted-daemon.js";

let daemon: ScriptedDaemon & Credentials;

beforeAll(async () => {
  daemon = await ScriptedDaemon.startSecured();
});
afterAll(async () => {
  await daemon.stop();
});

/** Generates and pauses as a client with these options. */
async function use(options: ConnectionOptions): Promise<void> {
  using client = new Client(daemon.address, options);
  expect((await client.generate("hello", { maxTokens: 2, timeoutMs: 10_000 })).tokenIds).toEqual([0, 1]);
  await client.paused(() => undefined);
}

function files(): ConnectionOptions {
  const { caFile, certFile, keyFile } = daemon;
  return { caFile, certFile, keyFile };
}

test("certificates in files and a token let a client in", async () => {
  await use({ ...files(), token: daemon.tokens.router });
});

test("certificates may be given as PEM", async () => {
  const [ca, cert, key] = [daemon.caFile, daemon.certFile, daemon.keyFile].map((path) => readFileSync(path, "utf8"));
  await use({ ca, cert, key, token: daemon.tokens.router });
});

test("a server name is what the certificate must name", async () => {
  const token = daemon.tokens.router;
  await use({ ...files(), token, serverName: "daemon.test" });
  await expect(use({ ...files(), token, serverName: "other.test" })).rejects.toBeInstanceOf(UnavailableError);
});

test("a call without a token, or with one of another role, has an error of its own", async () => {
  await expect(use(files())).rejects.toBeInstanceOf(UnauthenticatedError);
  await expect(use({ ...files(), token: daemon.tokens.generate })).rejects.toBeInstanceOf(PermissionDeniedError);
});

test("without a certificate of its own, or an authority for the daemon's, a client does not connect", async () => {
  const token = daemon.tokens.router;
  await expect(use({ caFile: daemon.caFile, token })).rejects.toBeInstanceOf(UnavailableError);
  await expect(use({ tls: true, token })).rejects.toBeInstanceOf(UnavailableError);
});

test("a client without TLS is told that the daemon may need it", async () => {
  await expect(use({ token: daemon.tokens.router, allowInsecure: true })).rejects.toThrow(
    /: it may need TLS, or a certificate$/,
  );
});

test("a push takes the same way in", async () => {
  using client = new Client(daemon.address, { ...files(), token: daemon.tokens.trainer });
  const tensors = randomTensors();
  expect((await client.pushTensors(tensors, { version: 1 })).push.state).toBe("applied");
  expect((await daemon.engine()).live).toEqual(digestsOf(tensors));
});
