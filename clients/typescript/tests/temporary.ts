/** A directory for all that the tests and their daemons write to the temporary one: it goes when they have ended. */

import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export function setup(): () => void {
  const directory = mkdtempSync(join(tmpdir(), "genserve-"));
  process.env["TMPDIR"] = directory;
  return () => {
    rmSync(directory, { recursive: true, force: true, maxRetries: 3 });
  };
}
