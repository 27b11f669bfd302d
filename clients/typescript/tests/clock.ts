/** Time that a test sets forward: deadlines, leases and pauses of minutes pass at once, and none by itself. */

import { vi } from "vitest";

const STEP_MS = 500;
const NUM_TURNS = 20;

/** Until its block ends, timers and clocks stand still but for `advance`. Sockets go on, and AbortSignal.timeout. */
export class Clock implements Disposable {
  constructor() {
    vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "setInterval", "clearInterval", "Date", "performance"] });
  }

  /** Lets so much time pass, in steps: what is due may set timers of its own. */
  async advance(milliseconds: number): Promise<void> {
    for (let left = milliseconds; left > 0; left -= STEP_MS) {
      await turns();
      await vi.advanceTimersByTimeAsync(Math.min(STEP_MS, left));
    }
    await turns();
  }

  [Symbol.dispose](): void {
    vi.useRealTimers();
  }
}

/** Lets everything run that is ready, many times over. */
async function turns(): Promise<void> {
  for (let turn = 0; turn < NUM_TURNS; turn++) await new Promise((resolve) => setImmediate(resolve));
}
