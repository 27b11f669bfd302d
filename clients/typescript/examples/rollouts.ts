/**
 * Collects groups of samples with what a policy gradient needs: tokens, log-probabilities, and the weight version of each
 * token.
 *
 *     npx tsx examples/rollouts.ts
 */

import { Client } from "genserve";

const questions = ["What is 2 + 3?", "What is 7 - 4?", "What is 3 * 3?"];
const prompts = questions.map((content) => [{ role: "user", content }]);

using client = new Client();
const options = { n: 4, maxTokens: 64, temperature: 1, logprobs: 0 };
for await (const { index, generation } of client.generateAsCompleted(prompts, options)) {
  if (generation.error !== undefined) {
    console.error(`${questions[index] ?? ""} failed: ${generation.error.message}`);
    continue;
  }
  for (const { tokenIds, logprobs, weightSpans } of generation.sequences) {
    const logprob = logprobs?.sampled.reduce((sum, each) => sum + each, 0) ?? NaN;
    const versions = weightSpans.map(({ version, start, end }) => `${version}: ${end - start}`).join(", ");
    console.log(
      `${questions[index] ?? ""} ${tokenIds.length} tokens, log p ${logprob.toFixed(2)}, by version {${versions}}`,
    );
  }
}
