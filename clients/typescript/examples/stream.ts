/**
 * Streams one answer to the terminal; Ctrl-C ends the request in the daemon.
 *
 *     npx tsx examples/stream.ts "Once upon a time"
 */

import { argv, stdout } from "node:process";
import { Client } from "genserve";

const prompt = argv[2] ?? "Once upon a time";
const interrupted = new AbortController();
process.once("SIGINT", () => {
  interrupted.abort();
});

using client = new Client(); // $GENSERVE_TARGET, or 127.0.0.1:50051
try {
  for await (const delta of client.stream(prompt, { maxTokens: 200, temperature: 0.8, signal: interrupted.signal })) {
    stdout.write(delta.text);
    if (delta.usage !== undefined) stdout.write(`\n(${delta.usage.numOutputTokens} tokens)\n`);
  }
} catch (error) {
  if (!interrupted.signal.aborted) throw error;
  stdout.write("\n(interrupted)\n");
}
