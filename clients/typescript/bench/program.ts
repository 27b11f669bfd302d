/**
 * The client on a load: `scripts/run bench/program.ts ADDRESS` obeys lines of JSON, as bench/languages of the project says.
 * bench/languages/python_program.py does the same with the Python client.
 */

import { argv, stdin } from "node:process";
import { createInterface } from "node:readline";
import { Client, type Tensor } from "genserve";

interface Generate {
  do: "generate";
  many: boolean;
  concurrency: number;
  requests: number;
  max_tokens: number;
}

type Order = Generate | { do: "pull" } | { do: "push" };

using client = new Client(argv[2]);
let tensors: Record<string, Tensor> = {};

console.log("READY");
for await (const line of createInterface(stdin)) {
  console.log(`ANSWER ${JSON.stringify(await carryOut(JSON.parse(line) as Order))}`);
}

async function carryOut(order: Order): Promise<Record<string, number>> {
  switch (order.do) {
    case "generate":
      return timed(() => generate(order));
    case "pull": {
      const pulled = await client.pullWeights();
      ({ tensors } = pulled);
      return { bytes: pulled.totalBytes };
    }
    case "push":
      return push();
  }
}

/** What the work told, how many seconds it took, and how many of the CPU in this process. */
async function timed(work: () => Promise<Record<string, number>>): Promise<Record<string, number>> {
  const beganAt = performance.now();
  const before = process.cpuUsage();
  const told = await work();
  const seconds = (performance.now() - beganAt) / 1e3;
  const { user, system } = process.cpuUsage(before);
  return { ...told, seconds, cpu_s: (user + system) / 1e6 };
}

async function generate({ many, concurrency, requests, max_tokens }: Generate): Promise<{ tokens: number }> {
  const options = { maxTokens: max_tokens, ignoreEos: true, temperature: 0, text: false };
  const prompts = Array.from({ length: requests }, (_, number) => [1 + (number % 500), 7, 3]);
  let tokens = 0;
  if (many) {
    for (let first = 0; first < requests; first += concurrency) {
      const part = prompts.slice(first, first + concurrency);
      for (const { tokenIds, error } of await client.generateMany(part, { ...options, streamInterval: 1 })) {
        if (error !== undefined) throw error;
        tokens += tokenIds.length;
      }
    }
    return { tokens };
  }
  const left = prompts.values();
  const slot = async () => {
    for (const prompt of left) {
      for await (const { tokenIds } of client.stream(prompt, options)) tokens += tokenIds.length;
    }
  };
  await Promise.all(Array.from({ length: concurrency }, slot));
  return { tokens };
}

/** Staged, which is what is timed; then committed. */
async function push(): Promise<Record<string, number>> {
  const version = (await client.getWeights()).weightVersion + 1;
  const pushId = `typescript-${version}`;
  const told = await timed(async () => {
    await client.pushTensors(tensors, { version, pushId, action: "stage" });
    return {};
  });
  await client.commitPush(pushId);
  return told;
}
