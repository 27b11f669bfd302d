import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { expect, test } from "vitest";
import { type ConnectionOptions, reachOf } from "../src/transport/settings.js";
import { DEFAULT_TIMEOUTS, deadlineOf, timeoutsOf } from "../src/transport/timeouts.js";

const directory = mkdtempSync(join(tmpdir(), "genserve-"));
const none = { HOME: "/nonexistent" };

function written(name: string, text: string): string {
  const path = join(directory, name);
  writeFileSync(path, text);
  return path;
}

function authorization(address: string | undefined, options: ConnectionOptions, environment: NodeJS.ProcessEnv = none) {
  return new Map(reachOf(address, options, environment).metadata()).get("authorization");
}

test("arguments come before the environment, and that before the file", () => {
  const file = { ...none, GENSERVE_CONFIG: written("a.toml", 'target = "of-file:1"') };
  const both = { ...file, GENSERVE_TARGET: "of-environment:1" };
  expect(reachOf("given:1", {}, both).address).toBe("given:1");
  expect(reachOf(undefined, {}, both).address).toBe("of-environment:1");
  expect(reachOf(undefined, {}, file).address).toBe("of-file:1");
  expect(reachOf(undefined, {}, none).address).toBe("127.0.0.1:50051");
});

test("a file without a name is looked for where configuration stands", () => {
  const environment = { XDG_CONFIG_HOME: mkdtempSync(join(tmpdir(), "genserve-")) };
  expect(reachOf(undefined, {}, environment).address).toBe("127.0.0.1:50051");
});

test("what a file has for its own target is for no other", () => {
  const token = written("token", "from-file\n");
  const config = written("b.toml", 'target = "127.0.0.1:7"\ntoken_file = "token"');
  const environment = { ...none, GENSERVE_CONFIG: config };
  expect(token).toContain(directory);
  expect(authorization(undefined, {}, environment)).toBe("Bearer from-file");
  expect(authorization("127.0.0.1:8", {}, environment)).toBeUndefined();
});

test("a token file is read again when it changes, and one that has become invalid changes nothing", () => {
  const tokenFile = written("changing", "one");
  const reach = reachOf("127.0.0.1:1", { tokenFile }, none);
  expect(reach.metadata()).toEqual([["authorization", "Bearer one"]]);
  written("changing", "second");
  expect(reach.metadata()).toEqual([["authorization", "Bearer second"]]);
  written("changing", "two words");
  expect(reach.metadata()).toEqual([["authorization", "Bearer second"]]);
});

test("a token of the environment does not replace one that is given as a file", () => {
  const tokenFile = written("given", "given");
  expect(authorization("127.0.0.1:1", { tokenFile }, { ...none, GENSERVE_TOKEN: "other" })).toBe("Bearer given");
  expect(authorization("127.0.0.1:1", {}, { ...none, GENSERVE_TOKEN: "other" })).toBe("Bearer other");
});

test("an empty token is none, whatever the environment has", () => {
  expect(authorization("127.0.0.1:1", { token: "" }, { ...none, GENSERVE_TOKEN: "other" })).toBeUndefined();
});

test("a token does not leave the host unencrypted, unless that is allowed", () => {
  expect(() => reachOf("daemon:1", { token: "secret" }, none)).toThrow(/token: would go to daemon:1 unencrypted/);
  expect(authorization("daemon:1", { token: "secret", tls: true })).toBe("Bearer secret");
  expect(authorization("daemon:1", { token: "secret", allowInsecure: true })).toBe("Bearer secret");
  for (const local of ["localhost:1", "127.0.0.9:1", "[::1]:1", "unix:/run/genserve", "dns:///localhost:1"]) {
    expect(authorization(local, { token: "secret" })).toBe("Bearer secret");
  }
  for (const other of ["127.0.0.1.example:1", "localhost.example:1"]) {
    expect(() => reachOf(other, { token: "secret" }, none)).toThrow(/unencrypted/);
  }
});

test("a host whose name begins as the address of a socket is called with TLS", () => {
  expect(reachOf("unix1.example:1", { tls: true }, none).credentials._isSecure()).toBe(true);
  expect(reachOf("unix:/run/genserve", { tls: true }, none).credentials._isSecure()).toBe(false);
});

test("limits have defaults, also where one is undefined, and others are refused", () => {
  expect(timeoutsOf({ generateMs: undefined, pushMs: 5 })).toEqual({ ...DEFAULT_TIMEOUTS, pushMs: 5 });
  expect(() => timeoutsOf({ generatMs: 1 } as object)).toThrow("timeouts.generatMs: is not a limit of a client");
  expect(() => timeoutsOf({ constructor: 1 } as object)).toThrow("timeouts.constructor: is not a limit of a client");
  expect(() => timeoutsOf({ pushMs: "1" } as object)).toThrow('timeouts.pushMs: "1" is not a number of milliseconds');
  expect(deadlineOf(1e300)).toBe(Infinity);
});

test("a message never has a token that is refused", () => {
  expect(() => reachOf("127.0.0.1:1", { token: "my secret" }, none)).toThrow(/^token: must be printable ASCII/);
});

const certFile = written("cert.pem", "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n");
const keyFile = written("key.pem", "-----BEGIN EC PRIVATE KEY-----\n-----END EC PRIVATE KEY-----\n");

test.each(["daemon:65535", "[::1]:1", "dns:daemon", "dns:///daemon", "ipv4:127.0.0.1:1,127.0.0.2:1", "unix:/run/d:x"])(
  "the address %j is taken",
  (address) => {
    expect(reachOf(address, {}, none).address).toBe(address);
  },
);

const refused: [address: string, options: object, environment: NodeJS.ProcessEnv, field: string][] = [
  ["", {}, none, "address"],
  ["http://daemon:1", {}, none, "address"],
  ["daemon", {}, none, "address"],
  ["daemon:", {}, none, "address"],
  ["daemon:port", {}, none, "address"],
  ["daemon:0", {}, none, "address"],
  ["dns:///daemon:99999", {}, none, "address"],
  ["[::1]:65536", {}, none, "address"],
  ["daemon:1", { keyFile: "/key.pem" }, none, "key"],
  ["daemon:1", { serverName: "daemon" }, none, "serverName"],
  ["daemon:1", { caFile: "/nonexistent.pem" }, none, "caFile"],
  ["daemon:1", { caFile: keyFile }, none, "caFile"],
  ["daemon:1", { ca: "/path/of/ca.pem" }, none, "ca"],
  ["daemon:1", { certFile: keyFile }, none, "certFile"],
  ["daemon:1", { certFile, keyFile: certFile }, none, "keyFile"],
  ["daemon:1", { certFile }, none, "cert"],
  ["daemon:1", { tokenFile: "/nonexistent", tls: true }, none, "tokenFile"],
  ["daemon:1", { ca_file: "/ca.pem" }, none, "ca_file"],
  ["daemon:1", { tls: "yes" }, none, "tls"],
  ["daemon:1", { ca: true }, none, "ca"],
  ["daemon:1", { token: 5 }, none, "token"],
  ["daemon:1", { metadata: { "a key": "1" } }, none, "metadata"],
  ["daemon:1", { metadata: { key: 1 } }, none, "metadata.key"],
  ["daemon:1", { interceptors: [5] }, none, "interceptors"],
  ["daemon:1", {}, { ...none, GENSERVE_TLS: "maybe" }, "$GENSERVE_TLS"],
  ["daemon:1", {}, { ...none, GENSERVE_TLS: "constructor" }, "$GENSERVE_TLS"],
  ["daemon:1", {}, { ...none, GENSERVE_CONFIG: "/nonexistent.toml" }, "/nonexistent.toml"],
];

test.each(refused)("address %j with %j is refused, naming what is wrong", (address, options, environment, field) => {
  expect(() => reachOf(address, options, environment)).toThrow(
    expect.objectContaining({ message: expect.stringContaining(`${field}: `) as string }) as Error,
  );
});

test.each([
  ["token = 'x'", 'unknown key "token"'],
  ["tls = 'yes'", "tls must be a boolean"],
  ["target = ", "Invalid TOML"],
])("the file %j is refused", (text, problem) => {
  const environment = { ...none, GENSERVE_CONFIG: written("wrong.toml", text) };
  expect(() => reachOf("daemon:1", {}, environment)).toThrow(problem);
});
