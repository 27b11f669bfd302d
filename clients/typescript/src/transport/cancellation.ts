/** What can be ended before it is over. */
export interface Cancellable {
  cancel(): void;
}

/**
 * The calls that end when a signal is aborted. A signal has one listener for all of them: programs give many calls the
 * same signal, and Node takes more than ten listeners for a leak, and warns.
 */
export class SignalledCalls {
  readonly #bySignal = new Map<AbortSignal, { calls: Set<Cancellable>; cancelAll: () => void }>();

  /** Cancels the call when the signal is aborted, until the function that this returns is called. */
  add(signal: AbortSignal, call: Cancellable): () => void {
    const { calls, cancelAll } = this.#bySignal.get(signal) ?? this.#listen(signal);
    calls.add(call);
    return () => {
      if (!calls.delete(call) || calls.size > 0) return;
      signal.removeEventListener("abort", cancelAll);
      this.#bySignal.delete(signal);
    };
  }

  #listen(signal: AbortSignal): { calls: Set<Cancellable>; cancelAll: () => void } {
    const calls = new Set<Cancellable>();
    const listening = {
      calls,
      cancelAll: () => {
        for (const call of calls) call.cancel();
      },
    };
    signal.addEventListener("abort", listening.cancelAll, { once: true });
    this.#bySignal.set(signal, listening);
    return listening;
  }
}
