import { defineConfig } from "vitest/config";

const alias = {
  "genserve/v1": new URL("src/v1.ts", import.meta.url).pathname,
  genserve: new URL("src/index.ts", import.meta.url).pathname,
};
// Daemons start in hooks; the program of one gives it up after four minutes.
const test = { globalSetup: "tests/temporary.ts", testTimeout: 60_000, hookTimeout: 270_000 };

export default defineConfig({
  test: {
    projects: [
      // These wait for others more than they compute. Modules are imported once for all files of a process.
      { resolve: { alias }, test: { ...test, name: "scripted", include: ["tests/*.test.ts"], isolate: false } },
      {
        resolve: { alias },
        test: { ...test, name: "engine", include: ["tests/engine/*.test.ts"] },
      },
    ],
    maxWorkers: 4,
  },
});
