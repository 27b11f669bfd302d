/** The results of a generation: deltas as they stream, and their sum. Positions count from 0 in a sequence's output. */

import { GenserveError } from "../errors.js";
import { type ReceivedWord, wordOf } from "../transport/words.js";
import * as wire from "../wire/genserve/v1/generation.js";
import type * as types from "../wire/genserve/v1/types.js";

/** Why a sequence ended; `unknown_9` for a reason of a newer daemon. */
export type FinishReason = ReceivedWord<typeof wire.FinishReason>;

/** Natural logarithms of consecutive tokens' probabilities, as columns; `alternativesAt` reads a row. */
export type Logprobs = types.Logprobs;

/** Output tokens [start, end) were sampled under weights `version`; 0 = those before the first push. */
export type WeightSpan = types.WeightSpan;

/** What is known of the prompt. Token ids and log-probabilities are there if requested. */
export type PromptInfo = wire.Prompt;

/** Tokens counted; output tokens are those of all sequences together. */
export type Usage = wire.Usage;

/** How a sequence ended. */
export interface Finish {
  reason: FinishReason;
  stopTokenId: number | undefined;
  stopString: string | undefined;
  numTokens: number;
  weightSpans: WeightSpan[];
  /** Sum of the sampled tokens' log-probabilities, when they were asked for. */
  cumulativeLogprob: number | undefined;
}

/** New output of one of the n sequences. */
export interface SequenceDelta {
  /** Which of the n sequences. */
  index: number;
  tokenIds: number[];
  /** It may lag behind the tokens while a character or a possible stop string is incomplete. */
  text: string;
  /** Of the new tokens, when asked for. */
  logprobs: Logprobs | undefined;
  /** Of exactly the new tokens. */
  weightSpans: WeightSpan[];
  /** Set on the last delta of the sequence. */
  finish: Finish | undefined;
}

/** New output of one request. */
export interface Delta {
  requestId: string;
  /** On the first delta. If the prompt is too large for one, it goes on in the next ones, before any output. */
  prompt: PromptInfo | undefined;
  /** Sequences with new output. */
  outputs: SequenceDelta[];
  /** On the last delta. */
  usage: Usage | undefined;
  /** New text of the first sequence. */
  text: string;
  /** New tokens of the first sequence. */
  tokenIds: number[];
}

/** One sequence. `weightSpans` cover it without gaps; `logprobs` has one row per token, if requested. */
export interface GeneratedSequence {
  index: number;
  text: string;
  tokenIds: number[];
  logprobs: Logprobs | undefined;
  weightSpans: WeightSpan[];
  /** Undefined while it runs, and if its request failed. */
  finish: Finish | undefined;
}

/** Far more than vLLM allows a request: an index that is damaged shall not fill the memory. */
const MAX_INDEX = 1 << 16;

/** The sum of a request's deltas. */
export class Generation {
  requestId = "";
  prompt: PromptInfo | undefined;
  /** The n sequences, by index. */
  readonly sequences: GeneratedSequence[] = [];
  usage: Usage | undefined;
  /** Why it failed; only of `generateMany`, where an error ends one request and not the others. */
  error: GenserveError | undefined;

  /** Text of the first sequence. */
  get text(): string {
    return this.sequences[0]?.text ?? "";
  }

  /** Tokens of the first sequence. */
  get tokenIds(): number[] {
    return this.sequences[0]?.tokenIds ?? [];
  }

  /** Adds the next delta. */
  add(delta: Delta): void {
    this.requestId = delta.requestId;
    if (delta.prompt !== undefined) this.#extendPrompt(delta.prompt);
    this.usage = delta.usage ?? this.usage;
    for (const output of delta.outputs) extend(this.#sequence(output.index), output);
  }

  #extendPrompt(prompt: PromptInfo): void {
    if (this.prompt === undefined) {
      const { tokenIds, logprobs } = prompt;
      this.prompt = { ...prompt, tokenIds: [...tokenIds], logprobs: logprobs && extended(noLogprobs(), logprobs) };
      return;
    }
    append(this.prompt.tokenIds, prompt.tokenIds);
    if (prompt.logprobs !== undefined) extended((this.prompt.logprobs ??= noLogprobs()), prompt.logprobs);
  }

  #sequence(index: number): GeneratedSequence {
    if (index > MAX_INDEX) throw new GenserveError(`the daemon answered with sequence ${index}`);
    while (this.sequences.length <= index) {
      const common = { text: "", tokenIds: [], logprobs: undefined, weightSpans: [], finish: undefined };
      this.sequences.push({ index: this.sequences.length, ...common });
    }
    return this.sequences[index]!;
  }
}

/** The (token id, log-probability) pairs of the alternatives at one position, most likely first. */
export function alternativesAt(logprobs: Logprobs, position: number): [tokenId: number, logprob: number][] {
  const { width, tokenIds, values } = logprobs;
  const row = tokenIds.slice(position * width, (position + 1) * width);
  return row.map((tokenId, column) => [tokenId, values[position * width + column]!]);
}

/** From the wire; `requestId` because only the first message has it. */
export function deltaOf(message: wire.GenerateResponse, requestId: string): Delta {
  const outputs = message.outputs.map(({ finish, ...output }) => ({ ...output, finish: finish && finishOf(finish) }));
  const first = outputs.find((output) => output.index === 0);
  return {
    requestId: message.requestId || requestId,
    prompt: message.prompt,
    outputs: outputs as SequenceDelta[],
    usage: message.usage,
    text: first?.text ?? "",
    tokenIds: first?.tokenIds ?? [],
  };
}

function finishOf({ reason, stop, numTokens, weightSpans, cumulativeLogprob }: wire.Finish): Finish {
  return {
    reason: wordOf(wire.FinishReason, reason),
    stopTokenId: stop?.$case === "stopTokenId" ? stop.value : undefined,
    stopString: stop?.$case === "stopString" ? stop.value : undefined,
    numTokens,
    weightSpans,
    cumulativeLogprob,
  };
}

function extend(sequence: GeneratedSequence, delta: SequenceDelta): void {
  sequence.text += delta.text;
  append(sequence.tokenIds, delta.tokenIds);
  if (delta.logprobs !== undefined) extended((sequence.logprobs ??= noLogprobs()), delta.logprobs);
  for (const span of delta.weightSpans) {
    const last = sequence.weightSpans.at(-1);
    if (last?.version === span.version && last.loraVersion === span.loraVersion && last.end === span.start) {
      last.end = span.end;
    } else sequence.weightSpans.push({ ...span });
  }
  if (delta.finish !== undefined) {
    sequence.finish = delta.finish;
    sequence.weightSpans = delta.finish.weightSpans.map((span) => ({ ...span }));
  }
}

function noLogprobs(): Logprobs {
  return { sampled: [], ranks: [], width: 0, tokenIds: [], values: [] };
}

/** `logprobs` with the rows of `more` behind its own. */
function extended(logprobs: Logprobs, more: Logprobs): Logprobs {
  append(logprobs.sampled, more.sampled);
  append(logprobs.ranks, more.ranks);
  append(logprobs.tokenIds, more.tokenIds);
  append(logprobs.values, more.values);
  logprobs.width = Math.max(logprobs.width, more.width);
  return logprobs;
}

/** Not `push(...items)`, whose number of arguments is limited. */
function append<Item>(list: Item[], items: readonly Item[]): void {
  for (const item of items) list.push(item);
}
