/**
 * Replaces the served weights by those of a checkpoint, while a pause keeps the engine from sampling with old ones.
 *
 *     npx tsx examples/push.ts path/to/checkpoint
 */

import { argv } from "node:process";
import { Client, GenserveError, ManifestMismatchError } from "genserve";

const path = argv[2];
if (path === undefined) throw new Error("usage: push.ts CHECKPOINT");

using client = new Client();
try {
  await client.paused(
    async ({ leaseId, signal }) => {
      const { weightVersion } = await client.getWeights();
      const { applied } = await client.pushCheckpoint(path, {
        version: weightVersion + 1,
        pauseLeaseId: leaseId,
        signal, // a push is of no use when the pause is lost
        onProgress: ({ sentBytes, totalBytes, elapsedMs }) => {
          if (sentBytes === totalBytes) console.log(`${totalBytes} bytes sent in ${Math.round(elapsedMs)} ms`);
        },
      });
      console.log(`serving version ${applied?.activeVersion ?? "?"}`, applied?.stepMs);
    },
    { holder: "examples/push.ts" },
  );
} catch (error) {
  if (error instanceof ManifestMismatchError) console.error(error.violations);
  if (!(error instanceof GenserveError)) throw error;
  console.error(`${error.reason}: ${error.message}`);
  process.exitCode = 1;
}
