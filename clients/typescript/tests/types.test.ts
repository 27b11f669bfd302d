/** What TypeScript knows of results. `npm run typecheck` finds the mistakes that these tests are about. */

import { ERROR_CLASSES, type FinishReason, GenserveError, type PauseMode, type Phase, QueueFullError } from "genserve";
import { expect, expectTypeOf, test } from "vitest";

test("the reason of an error is one of the known ones, which an editor lists, or that of a newer daemon", () => {
  const { reason } = new QueueFullError("full");
  expectTypeOf<"QUEUE_FULL">().toExtend<typeof reason>();
  expectTypeOf<"INTERNAL">().toExtend<typeof reason>();
  expectTypeOf<"A_NEWER_ONE">().toExtend<typeof reason>();
  expectTypeOf<string>().not.toEqualTypeOf<typeof reason>(); // as which it would list none
  expect(reason).toBe("QUEUE_FULL");
  expect(new GenserveError("new", { reason: "A_NEWER_ONE" }).reason).toBe("A_NEWER_ONE");
  expect(ERROR_CLASSES[0]).toBe(GenserveError);
});

test("words of a daemon may be unknown here, and words for a daemon may not", () => {
  expectTypeOf<"stop_string" | "length" | "unspecified" | "unknown_9">().toExtend<FinishReason>();
  expectTypeOf<"unknown_9" | "running">().toExtend<Phase>();
  expectTypeOf<"unknown_nine">().not.toExtend<FinishReason>();
  expectTypeOf<"unknown_9">().not.toExtend<PauseMode>();
});
