/** A program of tests/support that serves a daemon and takes commands: a line of JSON answers each of them. */

import { type ChildProcessWithoutNullStreams, spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../../..", import.meta.url));

/** Where the daemon is. */
export interface Addresses {
  address: string;
  /** The same daemon, through a proxy. */
  proxy: string;
}

export class ServedProcess {
  readonly #process: ChildProcessWithoutNullStreams;
  readonly #lines: AsyncIterator<string>;

  constructor(module: string, ...args: string[]) {
    const python = process.env["GENSERVE_PYTHON"] ?? `${ROOT}.venv/bin/python`;
    this.#process = spawn(python, ["-m", module, ...args], { cwd: ROOT });
    this.#process.stderr.pipe(process.stderr);
    this.#lines = createInterface(this.#process.stdout)[Symbol.asyncIterator]();
  }

  /** What the program tells when it serves, and then in answer to a command. */
  async told(command?: string): Promise<unknown> {
    if (command !== undefined) this.#process.stdin.write(`${command}\n`);
    const line = await this.#lines.next();
    if (line.done === true) throw new Error("the program has ended");
    return JSON.parse(line.value);
  }

  /** Ends the connections that go through the proxy. */
  async reset(): Promise<void> {
    await this.told("reset");
  }

  /** The proxy sends so many bytes a second to the daemon over each connection; 0 = no limit. */
  async throttle(bytesPerSecond: number): Promise<void> {
    await this.told(`throttle ${bytesPerSecond}`);
  }

  /** Lets the program end. */
  async stop(): Promise<void> {
    const ended = new Promise((resolve) => this.#process.once("close", resolve));
    this.#process.stdin.end();
    await ended;
  }
}
