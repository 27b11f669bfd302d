import { Server, ServerCredentials, type ServerWritableStream, status } from "@grpc/grpc-js";
import { createServer, connect, type AddressInfo, type Server as SocketServer } from "node:net";
import { Client, DeadlineError } from "genserve";
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

const HOST = "127.0.0.77"; // nobody else takes its ports: one that was freed is free

/** A server on a free port, or on this one, that hands connections to the daemon. */
async function listening(port = 0): Promise<[server: SocketServer, port: number]> {
  const target = Number(daemon.address.split(":").at(-1));
  const server = createServer((socket) => {
    const onward = connect(target, "127.0.0.1");
    for (const each of [socket, onward]) each.on("error", () => undefined);
    socket.pipe(onward).pipe(socket);
  });
  await new Promise<void>((resolve) => server.listen(port, HOST, resolve));
  return [server, (server.address() as AddressInfo).port];
}

test("a daemon that serves is ready at once", async () => {
  await client.waitReady({ timeoutMs: 20_000 });
});

test("a daemon that is not there yet is waited for", async () => {
  const [reserving, port] = await listening();
  await new Promise((resolve) => reserving.close(resolve));
  using early = new Client(`${HOST}:${port}`);
  const waiting = early.waitReady({ timeoutMs: 50_000 });
  await expect(early.status({ timeoutMs: 30_000 })).rejects.toMatchObject({ reason: "UNAVAILABLE" });
  const [server] = await listening(port);
  await waiting;
  early.close();
  server.close();
});

test("a daemon that answers and does not serve is waited for", async () => {
  await client.sleep();
  const waiting = client.waitReady({ timeoutMs: 50_000 });
  await expect(client.generate("hello", { timeoutMs: 30_000 })).rejects.toMatchObject({ reason: "ENGINE_SLEEPING" });
  await client.wakeUp();
  await waiting;
});

test("the deadline of the wait says what the daemon does instead", async () => {
  expect((await client.sleep({ level: 0 })).asleepTags).toEqual(["scheduling"]);
  using clock = new Clock();
  const waiting = expect(client.waitReady({ timeoutMs: 20_000 })).rejects.toMatchObject({
    name: "DeadlineError",
    message: expect.stringMatching(`no daemon was ready at ${daemon.address} within 20 s: it is asleep`) as string,
  });
  for (let call = 0; call < 5; call++) await client.status(); // over the same connection, after the answer of health
  await clock.advance(20_000);
  await waiting;
  await client.wakeUp();
});

test("the deadline of a wait for nobody names the address", async () => {
  using nobody = new Client("127.0.0.1:1");
  const waiting = nobody.waitReady({ timeoutMs: 300 });
  await expect(waiting).rejects.toBeInstanceOf(DeadlineError);
  await expect(waiting).rejects.toThrow(/^no daemon was ready at 127\.0\.0\.1:1 within 0\.3 s$/);
});

test("a wait ends when its signal is aborted", async () => {
  using nobody = new Client("127.0.0.1:1");
  const signal = AbortSignal.timeout(100);
  await expect(nobody.waitReady({ signal })).rejects.toMatchObject({ name: "TimeoutError" });
});

test("parts of the engine sleep and wake up", async () => {
  const asleep = await client.sleep({ tags: ["kv_cache"], mode: "abort" });
  expect(asleep.phase).toBe("sleeping");
  expect(asleep.asleepTags).toContain("kv_cache");
  expect(asleep.asleepTags).not.toContain("weights");
  expect((await client.wakeUp({ tags: ["kv_cache"] })).phase).toBe("running");
  expect(await client.resetCache()).toBe(true);
});

test("a proxy without a daemon, which refuses every call at once, is asked with pauses", async () => {
  let numAsked = 0;
  const proxy = new Server();
  const watch = {
    path: "/grpc.health.v1.Health/Watch",
    requestStream: false,
    responseStream: true,
    requestSerialize: (bytes: Buffer) => bytes,
    requestDeserialize: (bytes: Buffer) => bytes,
    responseSerialize: (bytes: Buffer) => bytes,
    responseDeserialize: (bytes: Buffer) => bytes,
  } as const;
  proxy.addService(
    { watch },
    {
      watch: (call: ServerWritableStream<Buffer, Buffer>) => {
        numAsked++;
        call.emit("error", { code: status.UNAVAILABLE, details: "no healthy upstream" });
      },
    },
  );
  const port = await new Promise<number>((resolve, reject) => {
    proxy.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) => {
      if (error === null) resolve(bound);
      else reject(error);
    });
  });
  using nobody = new Client(`127.0.0.1:${port}`);
  using clock = new Clock();
  const waiting = expect(nobody.waitReady({ timeoutMs: 60_000 })).rejects.toBeInstanceOf(DeadlineError);
  const startedAt = performance.now();
  while (numAsked < 10) await clock.advance(20);
  expect(performance.now() - startedAt).toBeGreaterThanOrEqual(9 * 200);
  await clock.advance(60_000);
  await waiting;
  proxy.forceShutdown();
});
