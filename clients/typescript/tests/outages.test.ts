/** Pushes and pulls through outages: a proxy keeps the connections that are open, and refuses new ones. */

import { connect, createServer, type AddressInfo, type Server, type Socket } from "node:net";
import { Client, DeadlineError, type Tensor, UnavailableError } from "genserve";
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from "vitest";
import { digestsOf, randomTensors } from "./checkpoints.js";
import { Clock } from "./clock.js";
import { ScriptedDaemon } from "./scripted-daemon.js";

const HOST = "127.0.0.78"; // nobody else takes its ports: one that was closed is free
const CHUNK_BYTES = 64 << 10;
const CUT_AFTER_BYTES = 3 << 20; // of 8 MiB

/** A TCP proxy of the daemon. */
class Proxy {
  readonly #daemonPort: number;
  #server: Server | undefined;
  #port = 0;
  /** In the order in which they were accepted. */
  readonly #connections: Socket[] = [];

  constructor(daemonAddress: string) {
    this.#daemonPort = Number(daemonAddress.split(":").at(-1));
  }

  get address(): string {
    return `${HOST}:${this.#port}`;
  }

  /** Accepts connections, always on the same port. */
  async accept(): Promise<void> {
    const server = createServer((socket) => {
      this.#connections.push(socket);
      const onward = connect(this.#daemonPort, "127.0.0.1");
      for (const [each, other] of [
        [socket, onward],
        [onward, socket],
      ] as const) {
        each.on("error", () => undefined);
        each.on("close", () => other.destroy());
      }
      socket.pipe(onward).pipe(socket);
    });
    await new Promise<void>((resolve) => server.listen(this.#port, HOST, resolve));
    this.#port = (server.address() as AddressInfo).port;
    this.#server = server;
  }

  /** Refuses new connections. Those that are open go on. */
  refuse(): void {
    this.#server?.close();
    this.#server = undefined;
  }

  /** Ends the connection that was accepted last. */
  cutLast(): void {
    this.#connections.at(-1)?.resetAndDestroy();
  }

  close(): void {
    this.refuse();
    for (const connection of this.#connections) connection.destroy();
  }
}

let daemon: ScriptedDaemon;
let proxy: Proxy;
let client: Client;
let tensors: Record<string, Tensor>;
let version = 0;

beforeAll(async () => {
  daemon = await ScriptedDaemon.start();
});
afterAll(async () => {
  await daemon.stop();
});
beforeEach(async () => {
  proxy = new Proxy(daemon.address);
  await proxy.accept();
  client = new Client(proxy.address);
  await client.status(); // the control connection, which no outage here ends
  tensors = randomTensors();
  version += 10;
});
afterEach(() => {
  client.close();
  proxy.close();
});

/** Options of a push whose connection is cut in the middle, once, when new ones are refused. */
function cutOnce(onCut: () => void) {
  let isCut = false;
  return {
    version,
    chunkBytes: CHUNK_BYTES,
    onProgress: ({ sentBytes }: { sentBytes: number }) => {
      if (isCut || sentBytes < CUT_AFTER_BYTES) return;
      isCut = true;
      proxy.refuse();
      proxy.cutLast();
      onCut();
    },
  };
}

test.each([500, 5_000])("a push survives %d ms in which new connections are refused", async (outageMs) => {
  let acceptedAgain: Promise<void> | undefined;
  const cut = cutOnce(() => {
    acceptedAgain = new Promise((resolve) => setTimeout(resolve, outageMs)).then(() => proxy.accept());
  });
  let numResumes = 0;
  const { push } = await client.pushTensors(tensors, {
    ...cut,
    onProgress: (progress) => {
      numResumes = progress.numResumes;
      cut.onProgress(progress);
    },
  });
  await acceptedAgain;
  expect(push.state).toBe("applied");
  expect(numResumes).toBe(1);
  expect((await daemon.engine()).live).toEqual(digestsOf(tensors));
});

test("a pull survives 2 s without a connection", async () => {
  await client.pushTensors(tensors, { version });
  using fresh = new Client(proxy.address);
  let acceptedAgain: Promise<void> | undefined;
  let numChunks = 0;
  const pulled = await fresh.pullWeights({
    chunkBytes: CHUNK_BYTES,
    onProgress: () => {
      if (++numChunks !== 20) return;
      proxy.refuse();
      proxy.cutLast();
      acceptedAgain = new Promise((resolve) => setTimeout(resolve, 2_000)).then(() => proxy.accept());
    },
  });
  await acceptedAgain;
  expect(digestsOf(pulled.tensors)).toEqual(digestsOf(tensors));
});

test("a push whose outage does not end gives up after half a minute, and says what it waited for", async () => {
  using clock = new Clock();
  const pushing = client.pushTensors(tensors, { ...cutOnce(() => undefined), pushId: "given up" });
  const failed = pushing.catch((error: unknown) => error);
  const beganAt = Date.now();
  let failedAt = Infinity;
  void failed.then(() => (failedAt = Date.now()));
  while (failedAt === Infinity) {
    await clock.advance(500);
    await client.status(); // over the same connection as GetPush, which is answered meanwhile
  }
  const error = await failed;
  expect(failedAt - beganAt).toBeGreaterThan(20_000);
  expect(failedAt - beganAt).toBeLessThan(40_000);
  expect(error).toBeInstanceOf(UnavailableError);
  expect(error).toMatchObject({ metadata: { push_id: "given up" }, cause: { reason: "UNAVAILABLE" } });
  expect((error as Error).message).toMatch(
    // The clock is faster than the daemon's answer to the last GetPush.
    /^waited \d+ s to resume push "given up": (no daemon answers at [\d.:]+: connect ECONN|GetPush was not answered)/,
  );
});

test("the caller's deadline ends a push in an outage, and the error says what it waited for", async () => {
  const cut = cutOnce(() => undefined);
  const pushing = client.pushTensors(tensors, { ...cut, pushId: "late", timeoutMs: 2_000 });
  const error: unknown = await pushing.catch((thrown: unknown) => thrown);
  expect(error).toBeInstanceOf(DeadlineError);
  expect(error).toMatchObject({ metadata: { push_id: "late" } });
  expect((error as Error).message).toMatch(
    /^push "late" did not end in time, and may still be applied: getPush tells \(waited \d+ s to resume it: no daemon/,
  );
});

test("an abort ends a push in an outage at once", async () => {
  const aborting = new AbortController();
  const reason = new Error("enough");
  let abortedAt = 0;
  const cut = cutOnce(() => {
    setTimeout(() => {
      abortedAt = performance.now();
      aborting.abort(reason);
    }, 2_000); // in the middle of a wait between two attempts
  });
  await expect(client.pushTensors(tensors, { ...cut, signal: aborting.signal })).rejects.toBe(reason);
  expect(performance.now() - abortedAt).toBeLessThan(500);
});
