import { Client, DrainingError, PauseLeaseLostError } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import { Clock } from "./clock.js";
import { ScriptedDaemon } from "./scripted-daemon.js";

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

test("the engine is paused while the work runs, and its result is returned", async () => {
  const result = await client.paused(
    async (lease) => {
      const { state } = await client.status();
      expect(state.phase).toBe("paused");
      expect(state.pauses).toMatchObject([{ leaseId: lease.leaseId, holder: "a test", mode: "abort" }]);
      expect((await daemon.engine()).running).toBe(false);
      return 7;
    },
    { holder: "a test", mode: "abort" },
  );
  expect(result).toBe(7);
  expect((await client.status()).state.phase).toBe("running");
});

test("work that fails ends the pause, and its error is thrown", async () => {
  const failure = new Error("the work failed");
  await expect(client.paused(() => Promise.reject(failure))).rejects.toBe(failure);
  expect((await daemon.engine()).running).toBe(true);
});

test("the lease is renewed while the work runs", async () => {
  const ttlMs = 60_000;
  using clock = new Clock();
  await client.paused(
    async ({ leaseId, signal }) => {
      const expiry = async () =>
        (await client.status()).state.pauses.find((each) => each.leaseId === leaseId)?.expireTime?.getTime();
      let last = await expiry();
      for (let renewal = 0; renewal < 4; renewal++) {
        await clock.advance(ttlMs / 3);
        let next = await expiry();
        while (next === last) {
          await clock.advance(100); // the answer of the renewal before came a little later
          next = await expiry();
        }
        expect(next).toBeGreaterThan(last ?? Infinity);
        last = next;
      }
      expect(signal.aborted).toBe(false);
    },
    { ttlMs },
  );
});

test("a lease that is lost aborts its signal, and is told when the work has ended", async () => {
  using clock = new Clock();
  const working = client.paused(
    async ({ signal }) => {
      const lost = new Promise((resolve) => {
        signal.addEventListener("abort", resolve);
      });
      await client.resume("", { force: true });
      await clock.advance(20_000);
      await lost;
    },
    { ttlMs: 60_000 },
  );
  await expect(working).rejects.toBeInstanceOf(PauseLeaseLostError);
});

test("a lost lease is thrown with the error of the work as its cause", async () => {
  const failure = new Error("the work failed");
  const working = client.paused(async () => {
    await client.resume("", { force: true });
    throw failure;
  });
  await expect(working).rejects.toMatchObject({ name: "PauseLeaseLostError", cause: failure });
});

test("a lease can be taken, renewed and ended by hand", async () => {
  const { lease, state } = await client.pause({ ttlMs: 30_000, kvPolicy: "recompute" });
  expect(state.phase).toBe("paused");
  const renewed = await client.renewPause(lease.leaseId, { ttlMs: 90_000 });
  expect(renewed.expireTime?.getTime()).toBeGreaterThan(lease.expireTime?.getTime() ?? Infinity);
  expect(await client.resume(lease.leaseId)).toMatchObject({ leaseExpired: false, state: { phase: "running" } });
});

test("a pause and a sleep may take as long as they like", async () => {
  expect(await client.paused(() => 7, { timeoutMs: Infinity })).toBe(7);
  expect((await client.sleep({ level: 0, timeoutMs: Infinity })).phase).toBe("sleeping");
  expect((await client.wakeUp({ timeoutMs: Infinity })).phase).toBe("running");
  await expect(client.pause({ timeoutMs: NaN })).rejects.toThrow("timeoutMs: NaN is not a number of milliseconds");
});

test("a watcher is told at once, and of every change", async () => {
  const phases: string[] = [];
  for await (const { state, load } of client.watch()) {
    expect(load.running).toBe(3);
    if (phases.at(-1) !== state.phase) phases.push(state.phase);
    if (phases.length === 1) void client.paused(() => undefined);
    if (phases.includes("paused") && state.phase === "running") break;
  }
  expect(phases).toEqual(["running", "paused", "running"]);
});

test("the daemon tells what it serves", async () => {
  const info = await client.serverInfo();
  expect(info).toMatchObject({ model: "scripted", device: "cpu", protection: { tls: false, roles: false } });
  expect(info.limits.maxStagingBytes).toBe(100 << 20);
  expect(info.limits).toMatchObject({ maxModelLen: 64, maxActiveRequests: 8192, maxN: 256, writeTimeoutMs: 300_000 });
});

test("a daemon that is drained refuses what comes", async () => {
  const drained = await ScriptedDaemon.start();
  using ops = new Client(drained.address);
  expect((await ops.drain({ drainTimeoutMs: 2_000 })).phase).toBe("draining");
  await expect(ops.generate([1])).rejects.toBeInstanceOf(DrainingError);
  await expect(ops.drain({ drainTimeoutMs: 0 })).rejects.toMatchObject({ reason: "INVALID_FIELD" });
  await drained.stop();
});
