import { setTimeout as sleep } from "node:timers/promises";

/** Waits between two attempts. Throws the reason of the signal when it is aborted. */
export async function pause(milliseconds: number, signal: AbortSignal | undefined): Promise<void> {
  await sleep(milliseconds, undefined, { signal }).catch(() => {
    signal?.throwIfAborted(); // Node throws an AbortError of its own
  });
}
