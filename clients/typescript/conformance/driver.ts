/**
 * Carries out one scenario with the client, as clients/conformance/README.md of the project says: a JSON object on stdin,
 * and on stdout a line of JSON for each of its steps.
 */

import { createHash } from "node:crypto";
import { text } from "node:stream/consumers";
import {
  type ChatMessage,
  Client,
  type GenerateOptions,
  Generation,
  GenserveError,
  type PauseLease,
  type Prompt,
  type PushAction,
  type PushResult,
  type WeightSpan,
} from "genserve";

interface Scenario {
  address: string;
  ca_file?: string;
  token?: string;
  steps: Step[];
}

interface Options {
  temperature?: number;
  top_p?: number;
  n?: number;
  seed?: number;
  max_tokens?: number;
  ignore_eos?: boolean;
  stop?: string[];
  logprobs?: number;
  request_id?: string;
  lora_name?: string;
  min_weight_version?: number;
  timeout_ms?: number;
}

interface Request {
  prompt: { text: string } | { token_ids: number[] } | { chat: ChatMessage[] };
  options?: Options;
}

interface Push {
  checkpoint: string;
  version: number;
  push_id?: string;
  action?: PushAction;
  expected_version?: number;
  partial?: boolean;
  lora_name?: string;
}

type Step =
  | ({ do: "generate" } & Request)
  | ({ do: "stream"; cancel_after_tokens?: number } & Request)
  | { do: "generate_many"; requests: Request[] }
  | ({ do: "push" } & Push)
  | { do: "commit" | "get_push" | "discard"; push_id: string }
  | { do: "get_weights" | "status" | "list_loras" }
  | { do: "pull"; version?: number }
  | { do: "pause"; name: string; holder?: string; ttl_ms?: number }
  | { do: "renew"; name: string; ttl_ms?: number }
  | { do: "resume"; name: string }
  | { do: "unload_lora"; lora_name: string };

const scenario = JSON.parse(await text(process.stdin)) as Scenario;
using client = new Client(scenario.address, { caFile: scenario.ca_file, token: scenario.token ?? "" });
const leases = new Map<string, PauseLease>();
for (const step of scenario.steps) {
  console.log(JSON.stringify(await carryOut(step).catch(failure)));
}

async function carryOut(step: Step): Promise<unknown> {
  switch (step.do) {
    case "generate":
      return generated(await client.generate(promptOf(step), optionsOf(step)));
    case "stream":
      return stream(step, step.cancel_after_tokens);
    case "generate_many": {
      const requests = step.requests.map((each) => ({ prompt: promptOf(each), ...optionsOf(each) }));
      const generations = await client.generateMany(requests);
      return { generations: generations.map((each) => (each.error ? failure(each.error) : generated(each))) };
    }
    case "push":
      return pushed(await push(step));
    case "commit":
      return pushed(await client.commitPush(step.push_id));
    case "get_push":
      return pushed(await client.getPush(step.push_id));
    case "discard":
      return { state: (await client.discardPush(step.push_id)).state };
    case "get_weights": {
      const { weightVersion, tensors } = await client.getWeights();
      return { version: weightVersion, tensors: tensors.length };
    }
    case "pull": {
      const { weightVersion, tensors } = await client.pullWeights({ version: step.version });
      const digests = Object.entries(tensors).map(([name, { data }]) => [name, sha256(data)] as const);
      return { version: weightVersion, sha256: Object.fromEntries(digests) };
    }
    case "pause": {
      const { lease } = await client.pause({ holder: step.holder, ttlMs: step.ttl_ms });
      leases.set(step.name, lease);
      return { holder: lease.holder };
    }
    case "renew":
      return { holder: (await client.renewPause(leaseId(step.name), { ttlMs: step.ttl_ms })).holder };
    case "resume":
      return { lease_expired: (await client.resume(leaseId(step.name))).leaseExpired };
    case "status": {
      const { state } = await client.status();
      return { phase: state.phase, version: state.weightVersion, pauses: state.pauses.map(({ holder }) => holder) };
    }
    case "list_loras": {
      const loras = await client.listLoras();
      return { names: loras.map(({ loraName }) => loraName), versions: loras.map(({ version }) => version) };
    }
    case "unload_lora":
      await client.unloadLora(step.lora_name);
      return {};
    default:
      return { error: { reason: "NOT_IMPLEMENTED" } };
  }
}

async function stream(request: Request, cancelAfterTokens = Infinity): Promise<unknown> {
  const cancelling = new AbortController();
  const sum = new Generation();
  const spans: WeightSpan[][] = []; // as they come: the sum has those of the last delta
  let numTokens = 0;
  try {
    const options = { ...optionsOf(request), signal: cancelling.signal };
    for await (const delta of client.stream(promptOf(request), options)) {
      sum.add(delta);
      for (const { index, tokenIds, weightSpans } of delta.outputs) {
        numTokens += tokenIds.length;
        for (const span of weightSpans) extend((spans[index] ??= []), span);
      }
      if (numTokens >= cancelAfterTokens) cancelling.abort();
    }
  } catch (error) {
    if (cancelling.signal.aborted) return { cancelled: true, num_tokens: numTokens };
    throw error;
  }
  for (const sequence of sum.sequences) sequence.weightSpans = spans[sequence.index] ?? [];
  return generated(sum);
}

function extend(spans: WeightSpan[], { version, start, end, loraVersion }: WeightSpan): void {
  const last = spans.at(-1);
  if (last?.version === version && last.loraVersion === loraVersion && last.end === start) last.end = end;
  else spans.push({ version, start, end, loraVersion });
}

/** The version of an adapter is there if one has sampled. */
function numbersOf({ version, start, end, loraVersion }: WeightSpan): number[] {
  return loraVersion === 0 ? [version, start, end] : [version, start, end, loraVersion];
}

function push({ checkpoint, lora_name: loraName, push_id: pushId, ...step }: Push): Promise<PushResult> {
  if (loraName !== undefined) return client.pushLora(loraName, checkpoint, { pushId, version: step.version });
  const { version, action, partial, expected_version: expectedVersion } = step;
  return client.pushCheckpoint(checkpoint, { version, pushId, action, partial, expectedVersion });
}

function promptOf({ prompt }: Request): Prompt {
  if ("text" in prompt) return prompt.text;
  return "chat" in prompt ? prompt.chat : prompt.token_ids;
}

function optionsOf({ options = {} }: Request): GenerateOptions {
  const { top_p, max_tokens, ignore_eos, request_id, lora_name, min_weight_version, timeout_ms, ...same } = options;
  return {
    ...same,
    topP: top_p,
    maxTokens: max_tokens,
    ignoreEos: ignore_eos,
    requestId: request_id,
    loraName: lora_name,
    minWeightVersion: min_weight_version,
    timeoutMs: timeout_ms,
  };
}

function generated({ sequences, requestId, prompt, usage }: Generation): object {
  return {
    sequences: sequences.map(({ tokenIds, text, finish, weightSpans, logprobs }) => ({
      token_ids: tokenIds,
      text,
      finish: finish?.reason,
      num_tokens: finish?.numTokens,
      stop_string: finish?.stopString,
      weight_spans: weightSpans.map(numbersOf),
      logprobs: logprobs?.sampled.map((each) => Number(each.toFixed(4))),
    })),
    request_id: requestId,
    prompt: prompt && { num_tokens: prompt.numTokens },
    prompt_tokens: usage?.numPromptTokens,
    output_tokens: usage?.numOutputTokens,
  };
}

function pushed({ push, applied }: PushResult): object {
  return {
    state: push.state,
    version: push.weightVersion,
    received_bytes: push.receivedBytes,
    total_bytes: push.totalBytes,
    previous_version: applied?.previousVersion,
    active_version: applied?.activeVersion,
  };
}

function failure(error: unknown): object {
  if (!(error instanceof GenserveError)) throw error;
  const fields = error.violations.map(({ field }) => field);
  return { error: { reason: error.reason, fields: fields.length > 0 ? fields : undefined } };
}

function leaseId(name: string): string {
  const lease = leases.get(name);
  if (lease === undefined) throw new Error(`there is no pause ${JSON.stringify(name)}`);
  return lease.leaseId;
}

function sha256(data: Uint8Array): string {
  return createHash("sha256").update(data).digest("hex");
}
