/** A daemon with a scripted engine, and a proxy in front of it: tests/support/scripted_server.py of the project. */

import { newDirectory } from "./checkpoints.js";
import { type Addresses, ServedProcess } from "./served-process.js";

/** What the engine has, and what it does. */
export interface Engine {
  /** SHA-256 of each live tensor. */
  live: Record<string, string>;
  running: boolean;
  /** Ids of requests whose call has ended, and of those that run. */
  closed: string[];
  open: string[];
  /** Requests that were refused. */
  numRefused: number;
  /** The adapters that requests have asked for. */
  loras: string[];
}

/** What a client of a daemon with TLS and roles needs. */
export interface Credentials {
  caFile: string;
  certFile: string;
  keyFile: string;
  /** By the role that they give; that of "router" gives all. */
  tokens: Record<"generate" | "trainer" | "operator" | "router", string>;
}

export class ScriptedDaemon extends ServedProcess {
  address = "";
  proxy = "";

  static async start(): Promise<ScriptedDaemon> {
    const daemon = new ScriptedDaemon("tests.support.scripted_server");
    return Object.assign(daemon, (await daemon.told()) as Addresses);
  }

  /** One that takes only connections and calls with credentials. */
  static async startSecured(): Promise<ScriptedDaemon & Credentials> {
    const daemon = new ScriptedDaemon("tests.support.scripted_server", "--secured", await newDirectory());
    return Object.assign(daemon, (await daemon.told()) as Addresses & Credentials);
  }

  async engine(): Promise<Engine> {
    return (await this.told("engine")) as Engine;
  }

  /** Returns when the call of a request has ended in the daemon. */
  async untilClosed(requestId: string): Promise<void> {
    while (!(await this.engine()).closed.includes(requestId));
  }

  /** Returns when a request runs. */
  async untilOpen(): Promise<void> {
    while ((await this.engine()).open.length === 0);
  }

  /** Returns when no request runs. */
  async untilAllClosed(): Promise<void> {
    while ((await this.engine()).open.length > 0);
  }
}
