import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["tests/**/*.test.ts"],
    globalSetup: "tests/temporary.ts",
    testTimeout: 60_000,
    // A daemon starts in one; its program gives it up after four minutes.
    hookTimeout: 270_000,
    // One daemon at a time: each takes the cores that there are.
    fileParallelism: false,
  },
  resolve: {
    alias: {
      "genserve/v1": new URL("src/v1.ts", import.meta.url).pathname,
      genserve: new URL("src/index.ts", import.meta.url).pathname,
    },
  },
});
