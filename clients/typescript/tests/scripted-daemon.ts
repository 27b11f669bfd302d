/** A daemon with a scripted engine, in a process of its own, and a proxy in front of it: tests/support/scripted_server.py. */

import { type ChildProcessWithoutNullStreams, spawn } from "node:child_process";
import { createInterface, type Interface } from "node:readline";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../../..", import.meta.url));

/** What the engine has, and what it does. */
export interface Engine {
  /** SHA-256 of each live tensor. */
  live: Record<string, string>;
  running: boolean;
  /** Ids of requests whose call has ended, and of those that run. */
  closed: string[];
  open: string[];
}

export class ScriptedDaemon {
  readonly address: string;
  /** The same daemon, through the proxy. */
  readonly proxy: string;
  readonly #process: ChildProcessWithoutNullStreams;
  readonly #lines: AsyncIterator<string>;

  private constructor(
    process: ChildProcessWithoutNullStreams,
    lines: AsyncIterator<string>,
    addresses: { address: string; proxy: string },
  ) {
    this.#process = process;
    this.#lines = lines;
    this.address = addresses.address;
    this.proxy = addresses.proxy;
  }

  static async start(): Promise<ScriptedDaemon> {
    const python = process.env["GENSERVE_PYTHON"] ?? `${ROOT}.venv/bin/python`;
    const started = spawn(python, ["-m", "tests.support.scripted_server"], { cwd: ROOT });
    started.stderr.pipe(process.stderr);
    const reader: Interface = createInterface(started.stdout);
    const lines = reader[Symbol.asyncIterator]();
    const first = (await lines.next()) as IteratorResult<string, undefined>;
    if (first.value === undefined) throw new Error("the scripted daemon has not started");
    return new ScriptedDaemon(started, lines, JSON.parse(first.value) as { address: string; proxy: string });
  }

  /** Ends all connections of the proxy. */
  async reset(): Promise<void> {
    await this.#tell("reset");
  }

  /** The proxy sends so many bytes a second to the daemon over each connection; 0 = no limit. */
  async throttle(bytesPerSecond: number): Promise<void> {
    await this.#tell(`throttle ${bytesPerSecond}`);
  }

  async engine(): Promise<Engine> {
    return (await this.#tell("engine")) as Engine;
  }

  /** Returns when the call of a request has ended in the daemon. */
  async untilClosed(requestId: string): Promise<void> {
    while (!(await this.engine()).closed.includes(requestId));
  }

  /** Returns when no request runs. */
  async untilAllClosed(): Promise<void> {
    while ((await this.engine()).open.length > 0);
  }

  stop(): void {
    this.#process.stdin.end();
  }

  async #tell(command: string): Promise<unknown> {
    this.#process.stdin.write(`${command}\n`);
    return JSON.parse((await this.#lines.next()).value as string);
  }
}
