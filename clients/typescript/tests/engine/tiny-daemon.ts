/** A real daemon on a tiny model, and a proxy in front of it: tests/support/tiny_server.py of the project. */

import { newDirectory } from "../checkpoints.js";
import { type Addresses, ServedProcess } from "../served-process.js";

interface Places extends Addresses {
  file: string;
  shards: string;
}

export class TinyDaemon extends ServedProcess {
  address = "";
  proxy = "";
  /** A safetensors file with other weights than those that are served first. */
  file = "";
  /** A checkpoint of the same weights in several files. */
  shards = "";

  static async start(): Promise<TinyDaemon> {
    const daemon = new TinyDaemon("tests.support.tiny_server", await newDirectory());
    return Object.assign(daemon, (await daemon.told()) as Places);
  }

  /** Digests of the live weights, by rank and name, when the Python client has pushed `file`. */
  async pushedByPython(version: number): Promise<Record<string, string>> {
    const { digests } = (await this.told(`push ${version}`)) as { digests: Record<string, string> };
    return digests;
  }
}
