import { execFile } from "node:child_process";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { afterAll, beforeAll, expect, test } from "vitest";
import { TinyDaemon } from "./tiny-daemon.js";

const PACKAGE = fileURLToPath(new URL("../..", import.meta.url));

let daemon: TinyDaemon;

beforeAll(async () => {
  daemon = await TinyDaemon.start();
}, 240_000);
afterAll(async () => {
  await daemon.stop();
});

async function run(example: string, ...args: string[]): Promise<string> {
  const env = { ...process.env, GENSERVE_TARGET: daemon.address };
  const command = ["--import", "tsx", `examples/${example}`, ...args];
  return (await promisify(execFile)(process.execPath, command, { cwd: PACKAGE, env })).stdout;
}

test("the example of a stream prints the answer and its number of tokens", async () => {
  expect(await run("stream.ts", "Once")).toMatch(/\(\d+ tokens\)/);
});

test("the example of rollouts prints four samples of each question", async () => {
  expect((await run("rollouts.ts")).match(/tokens, log p -\d+\.\d+, by version \{0: \d+\}/g)).toHaveLength(12);
});

test("the example of a push serves the checkpoint as the next version", async () => {
  expect(await run("push.ts", daemon.shards)).toMatch(/bytes sent in \d+ ms\nserving version 1/);
});
