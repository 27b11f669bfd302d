/** Options into a GenerateRequest. What the model takes is the daemon's to check; what a field cannot hold is refused. */

import { InvalidFieldError } from "../errors.js";
import { checkNumber, durationOf, isObject } from "../transport/fields.js";
import { CALL, checkOptions, type Kind, type Kinds } from "../transport/options.js";
import type { CallOptions } from "../transport/timeouts.js";
import { Chat, GenerateRequest, Output, Sampling, Stop, TokenizeRequest } from "../wire/genserve/v1/generation.js";
import type {
  ChatMessage,
  ChatOptions,
  ConstraintOptions,
  GenerateOptions,
  Json,
  OutputOptions,
  Prompt,
  RequestOptions,
  SamplingOptions,
  StopOptions,
} from "./options.js";

const SAMPLING: Kinds<SamplingOptions> = {
  temperature: "float",
  topP: "float",
  topK: "int32",
  minP: "float",
  presencePenalty: "float",
  frequencyPenalty: "float",
  repetitionPenalty: "float",
  seed: "seed",
  n: "int32",
  logitBias: "biases",
  allowedTokenIds: "numbers",
  badWords: "strings",
};
const STOP: Kinds<StopOptions> = {
  maxTokens: "int32",
  minTokens: "int32",
  stop: "texts",
  stopTokenIds: "numbers",
  ignoreEos: "boolean",
  includeStop: "boolean",
  timeBudgetMs: "milliseconds",
};
const CONSTRAINT: Kinds<ConstraintOptions> = {
  jsonSchema: "document",
  jsonObject: "boolean",
  regex: "string",
  grammar: "string",
  choice: "strings",
  structuralTag: "document",
};
const OUTPUT: Kinds<OutputOptions> = {
  text: "boolean",
  tokenIds: "boolean",
  skipSpecialTokens: "boolean",
  logprobs: "int32",
  promptLogprobs: "int32",
  promptTokenIds: "boolean",
  streamInterval: "uint32",
};
const CHAT: Kinds<ChatOptions> = {
  addGenerationPrompt: "boolean",
  continueFinalMessage: "boolean",
  templateParams: "json",
};
const PLAIN = {
  requestId: "string",
  loraName: "string",
  priority: "int32",
  dataParallelRank: "uint32",
  minWeightVersion: "uint32",
  engineParams: "json",
  sessionId: "string",
  resume: "boolean",
} as const satisfies Partial<Kinds<GenerateOptions>>;
const ALL: Kinds<GenerateOptions> = {
  ...SAMPLING,
  ...STOP,
  ...CONSTRAINT,
  ...OUTPUT,
  ...CHAT,
  ...PLAIN,
  ...CALL,
  cacheSalt: "string",
};
const MESSAGE: Kinds<ChatMessage> = { role: "string", content: "string" };

/** The message for a prompt and its options. Throws InvalidFieldError. */
export function generateRequest(prompt: Prompt, options: GenerateOptions): GenerateRequest {
  checkOptions(options, ALL);
  const chat = picked(CHAT, options);
  const request = GenerateRequest.fromPartial(picked(PLAIN, options));
  request.prompt = promptOf(prompt, chat);
  const sampling = picked(SAMPLING, options);
  if (!isEmpty(sampling)) request.sampling = Sampling.fromPartial(sampling);
  const { stop, stopTokenIds, timeBudgetMs, ...plainStop } = picked(STOP, options);
  if (stop !== undefined || stopTokenIds !== undefined || timeBudgetMs !== undefined || !isEmpty(plainStop)) {
    request.stop = Stop.fromPartial({
      ...plainStop,
      strings: stop === undefined ? [] : typeof stop === "string" ? [stop] : [...stop],
      tokenIds: [...(stopTokenIds ?? [])],
      ...(timeBudgetMs === undefined ? {} : { timeBudget: durationOf(timeBudgetMs, "timeBudgetMs") }),
    });
  }
  const output = picked(OUTPUT, options);
  if (!isEmpty(output)) request.output = Output.fromPartial(output);
  request.constraint = constraintOf(picked(CONSTRAINT, options));
  if (options.cacheSalt !== undefined) request.cache = { salt: options.cacheSalt };
  return request;
}

/** Options of a call that turns text or a chat into token ids. */
export type TokenizeOptions = CallOptions & ChatOptions & { addSpecialTokens?: boolean | undefined };

/** The message for text or the messages of a chat. Throws InvalidFieldError. */
export function tokenizeRequest(prompt: string | readonly ChatMessage[], options: TokenizeOptions): TokenizeRequest {
  checkOptions(options, { ...CALL, ...CHAT, addSpecialTokens: "boolean" });
  const { addSpecialTokens } = options;
  const request = TokenizeRequest.fromPartial(addSpecialTokens === undefined ? {} : { addSpecialTokens });
  const input = promptOf(prompt, picked(CHAT, options));
  if (input?.$case === "tokenIds") throw InvalidFieldError.of("prompt", "must be text or messages of a chat");
  request.input = input;
  return request;
}

function chatOf(messages: readonly ChatMessage[], options: ChatOptions): Chat {
  for (const [position, message] of messages.entries()) {
    const place = `chat.messages[${position}]`;
    checkOptions(message, MESSAGE, place);
    if (!("role" in message && "content" in message)) {
      throw InvalidFieldError.of(place, "must have a role and a content");
    }
  }
  return Chat.fromPartial({ ...options, messages } as object);
}

/** Whether this is a prompt, and not a request with options of its own. */
export function isPrompt(value: Prompt | RequestOptions): value is Prompt {
  return !isObject(value) || !("prompt" in value);
}

/** Whether the prompt is a sequence of messages. */
function isChat(prompt: Prompt): prompt is readonly ChatMessage[] {
  return Array.isArray(prompt) && typeof prompt[0] === "object";
}

function promptOf(prompt: Prompt, options: ChatOptions): GenerateRequest["prompt"] {
  if (isChat(prompt)) return { $case: "chat", value: chatOf(prompt, options) };
  const [option] = Object.keys(options);
  if (option !== undefined) throw InvalidFieldError.of(`chat.${option}`, "the prompt is not a chat");
  if (typeof prompt === "string") return { $case: "text", value: prompt };
  if (!Array.isArray(prompt)) throw InvalidFieldError.of("prompt", "must be text, token ids or messages of a chat");
  for (const id of prompt) checkNumber(id, "uint32", "prompt");
  return { $case: "tokenIds", value: { ids: [...(prompt as readonly number[])] } };
}

function constraintOf({ jsonObject, ...others }: ConstraintOptions): GenerateRequest["constraint"] {
  const given = Object.keys(others).concat(jsonObject === true ? ["jsonObject"] : []);
  if (given.length > 1) throw InvalidFieldError.of("constraint", `at most one of ${given.join(", ")}`);
  if (jsonObject === true) return { $case: "jsonObject", value: {} };
  const { jsonSchema, regex, grammar, choice, structuralTag } = others;
  if (jsonSchema !== undefined) return { $case: "jsonSchema", value: jsonText(jsonSchema, "jsonSchema") };
  if (structuralTag !== undefined) return { $case: "structuralTag", value: jsonText(structuralTag, "structuralTag") };
  if (regex !== undefined) return { $case: "regex", value: regex };
  if (grammar !== undefined) return { $case: "grammar", value: grammar };
  if (choice !== undefined) return { $case: "choice", value: { choices: [...choice] } };
  return undefined;
}

function jsonText(value: Json, name: string): string {
  try {
    return typeof value === "string" ? value : JSON.stringify(value);
  } catch (error) {
    throw InvalidFieldError.of(name, (error as Error).message); // such as a bigint
  }
}

type Given<Name extends keyof GenerateOptions> = { [Each in Name]?: Mutable<NonNullable<GenerateOptions[Each]>> };
type Mutable<Value> = Value extends readonly (infer Item)[] ? Item[] : Value;

/** The options of a group that are given. */
function picked<Name extends keyof GenerateOptions>(
  kinds: Readonly<Record<Name, Kind>>,
  options: GenerateOptions,
): Given<Name> {
  const found: Record<string, unknown> = {};
  for (const name of Object.keys(kinds) as Name[]) if (options[name] !== undefined) found[name] = options[name];
  return found as Given<Name>;
}

function isEmpty(options: object): boolean {
  return Object.keys(options).length === 0;
}
