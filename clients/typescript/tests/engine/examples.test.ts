import { execFile } from "node:child_process";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
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

async function run(program: string, ...args: string[]): Promise<string> {
  const env = { ...process.env, GENSERVE_TARGET: daemon.address };
  const command = ["--import", "tsx", program, ...args];
  return (await promisify(execFile)(process.execPath, command, { cwd: PACKAGE, env })).stdout;
}

test("the example of a stream prints the answer and its number of tokens", async () => {
  expect(await run("examples/stream.ts", "Once")).toMatch(/\(\d+ tokens\)/);
});

test("the example of rollouts prints four samples of each question", async () => {
  expect((await run("examples/rollouts.ts")).match(/tokens, log p -\d+\.\d+, by version \{0: \d+\}/g)).toHaveLength(12);
});

test("the example of a push serves the checkpoint as the next version", async () => {
  expect(await run("examples/push.ts", daemon.shards)).toMatch(/bytes sent in \d+ ms\nserving version 1/);
});

test("the program of the README runs as it stands, but for its address and its checkpoint", async () => {
  const [, program = ""] = /```ts\n(.*?)```/s.exec(await readFile(join(PACKAGE, "README.md"), "utf8")) ?? [];
  const places = { "127.0.0.1:50051": daemon.address, "path/to/checkpoint": daemon.file };
  let own = program;
  for (const [place, other] of Object.entries(places)) {
    expect(own).toContain(place);
    own = own.replace(place, other);
  }
  await mkdir(join(PACKAGE, "build"), { recursive: true });
  const directory = await mkdtemp(join(PACKAGE, "build", "readme-")); // here, so that it finds the package
  // It samples at random, and the model may end an answer early: 64 tokens at most.
  const told =
    "\nconsole.log(tokenIds.length > 0 && tokenIds.length <= 64, (await client.getWeights()).weightVersion);";
  try {
    await writeFile(join(directory, "program.mts"), own + told);
    expect(await run(join(directory, "program.mts"))).toMatch(/true 2\n$/);
  } finally {
    await rm(directory, { recursive: true });
  }
});

test("the README's further programs run as they stand, but for the address", async () => {
  const blocks = (await readFile(join(PACKAGE, "README.md"), "utf8")).matchAll(/```ts\n(.*?)```/gs);
  const [, many = "", timed = ""] = Array.from(blocks, ([, program = ""]) => program);
  const directory = await mkdtemp(join(PACKAGE, "build", "readme-"));
  try {
    for (const [program, output] of [
      [many, / true\n[^]* true\n$/],
      [timed, /^\/genserve\.v1\.ControlService\/GetStatus 0 [\d.]+\n$/],
    ] as const) {
      await writeFile(join(directory, "program.mts"), program.replace("127.0.0.1:50051", daemon.address));
      expect(await run(join(directory, "program.mts"))).toMatch(output);
    }
  } finally {
    await rm(directory, { recursive: true });
  }
});
