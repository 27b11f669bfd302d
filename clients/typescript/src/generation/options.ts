/** Options of a request. One that is not given leaves the daemon's default; zero is a value. */

import type { CallOptions } from "../transport/timeouts.js";

/** One message of a chat. */
export interface ChatMessage {
  /** "system", "user", "assistant" or another role of the model's template. */
  role: string;
  content: string;
}

/** Text, token ids, or the messages of a chat, oldest first. */
export type Prompt = string | readonly number[] | readonly ChatMessage[];

/** A JSON object, or a JSON document as text. */
export type Json = string | Readonly<Record<string, unknown>>;

/** How tokens are sampled; defaults are those of vLLM's SamplingParams. */
export interface SamplingOptions {
  /** 0 = greedy; default 1. */
  temperature?: number | undefined;
  /** In (0, 1]; default 1. */
  topP?: number | undefined;
  /** 0 or -1 = all tokens; default 0. */
  topK?: number | undefined;
  /** In [0, 1]; default 0. */
  minP?: number | undefined;
  /** In [-2, 2]; default 0. */
  presencePenalty?: number | undefined;
  /** In [-2, 2]; default 0. */
  frequencyPenalty?: number | undefined;
  /** Above 0; default 1. */
  repetitionPenalty?: number | undefined;
  /** Seed of this request's random numbers, an int64; default none. */
  seed?: number | bigint | undefined;
  /** Number of sequences; default 1. */
  n?: number | undefined;
  /** Added to the logits, by token id, each in [-100, 100]. */
  logitBias?: Readonly<Record<number, number>> | undefined;
  /** Only these tokens can be sampled. */
  allowedTokenIds?: readonly number[] | undefined;
  /** Words that must not be produced. */
  badWords?: readonly string[] | undefined;
}

/** When a sequence ends. */
export interface StopOptions {
  /** Most output tokens of a sequence; default: as many as the context holds. */
  maxTokens?: number | undefined;
  /** Fewest output tokens before anything else may end it; default 0. */
  minTokens?: number | undefined;
  /** A string that ends a sequence, or several. */
  stop?: string | readonly string[] | undefined;
  /** Tokens that end a sequence. */
  stopTokenIds?: readonly number[] | undefined;
  /** Goes on after EOS; default false. */
  ignoreEos?: boolean | undefined;
  /** Whether the stop string stays in the text; default false. */
  includeStop?: boolean | undefined;
  /** Time from admission after which what was produced is returned ("time_limit"). */
  timeBudgetMs?: number | undefined;
}

/** Restricts the output; at most one. */
export interface ConstraintOptions {
  /** A JSON schema. */
  jsonSchema?: Json | undefined;
  /** Any JSON object. */
  jsonObject?: boolean | undefined;
  /** A regular expression. */
  regex?: string | undefined;
  /** A context-free grammar in EBNF. */
  grammar?: string | undefined;
  /** One of these answers. */
  choice?: readonly string[] | undefined;
  /** xgrammar's structural tags. */
  structuralTag?: Json | undefined;
}

/** What the responses carry. */
export interface OutputOptions {
  /** Default true. Without it nothing is detokenised. */
  text?: boolean | undefined;
  /** Default true. */
  tokenIds?: boolean | undefined;
  /** Leaves special tokens out of the text; default true. */
  skipSpecialTokens?: boolean | undefined;
  /** Alternatives per output token; 0 = the sampled token's log-probability only; default: none. */
  logprobs?: number | undefined;
  /** The same for the prompt's tokens. */
  promptLogprobs?: number | undefined;
  /** Whether the prompt's token ids are returned; default false. */
  promptTokenIds?: boolean | undefined;
  /** Tokens per message and sequence; 0 = one final message; default: 1 for `stream`, else 0. */
  streamInterval?: number | undefined;
}

/** How a chat is rendered; refused with any other prompt. */
export interface ChatOptions {
  /** Whether the template opens an assistant turn; default true. */
  addGenerationPrompt?: boolean | undefined;
  /** Whether the last message is continued; default false. */
  continueFinalMessage?: boolean | undefined;
  /** Further arguments of the model's template. */
  templateParams?: Readonly<Record<string, unknown>> | undefined;
}

/** Every option of a request, and of its call. */
export interface GenerateOptions
  extends SamplingOptions, StopOptions, ConstraintOptions, OutputOptions, ChatOptions, CallOptions {
  /** Names the request in responses, logs and `abort`; minted when not given. */
  requestId?: string | undefined;
  /** A LoRA adapter that is loaded in the daemon. */
  loraName?: string | undefined;
  /** Smaller runs first. */
  priority?: number | undefined;
  /** Data-parallel engine that must run it; default: the least loaded. */
  dataParallelRank?: number | undefined;
  /** Only requests with the same salt share prefix cache entries. */
  cacheSalt?: string | undefined;
  /** Refuse the request while the served version is smaller. */
  minWeightVersion?: number | undefined;
  /** vLLM's other SamplingParams: those that change this request's own answer and nothing else. Others are refused. */
  engineParams?: Readonly<Record<string, unknown>> | undefined;
  /** Requests with the same one go to the same replica of a fleet, as long as it can serve them. */
  sessionId?: string | undefined;
  /** Whether the request goes on elsewhere if the replica of a fleet that runs it is lost; default false. */
  resume?: boolean | undefined;
}

/** Options that one of many requests can have: all have one call, which the call's options are for. */
export interface RequestOptions extends Omit<GenerateOptions, keyof CallOptions> {
  prompt: Prompt;
}
