/** Options into a GenerateRequest. What the model takes is the daemon's to check; what a field cannot hold is refused. */

import { InvalidFieldError } from "../errors.js";
import { checkNumber, durationOf, type NumberKind, refuseUnknown } from "../transport/fields.js";
import { Chat, GenerateRequest, Output, Sampling, Stop } from "../wire/genserve/v1/generation.js";
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

type Kind = NumberKind | "boolean" | "string" | "object" | "numbers" | "strings" | "seed" | "texts" | "milliseconds";
type Kinds<Options> = Readonly<Record<keyof Options & string, Kind>>;

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
  logitBias: "object",
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
  jsonSchema: "object",
  jsonObject: "boolean",
  regex: "string",
  grammar: "string",
  choice: "strings",
  structuralTag: "object",
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
  templateParams: "object",
};
const PLAIN = {
  requestId: "string",
  loraName: "string",
  priority: "int32",
  dataParallelRank: "uint32",
  minWeightVersion: "uint32",
  engineParams: "object",
  sessionId: "string",
  resume: "boolean",
} as const satisfies Partial<Kinds<GenerateOptions>>;
const CALL = { timeoutMs: "milliseconds", signal: "object", cacheSalt: "string" } as const;
const KNOWN = new Set(Object.keys({ ...SAMPLING, ...STOP, ...CONSTRAINT, ...OUTPUT, ...CHAT, ...PLAIN, ...CALL }));

/** The message for a prompt and its options. Throws InvalidFieldError. */
export function generateRequest(prompt: Prompt, options: GenerateOptions): GenerateRequest {
  refuseUnknown(options, KNOWN);
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

/** The message for a chat. */
export function chatOf(messages: readonly ChatMessage[], options: ChatOptions): Chat {
  for (const [position, message] of messages.entries()) {
    if (typeof message.role !== "string" || typeof message.content !== "string") {
      throw InvalidFieldError.of(`chat.messages[${position}]`, "must have a role and a content");
    }
  }
  return Chat.fromPartial({ ...options, messages } as object);
}

/** Whether this is a prompt, and not a request with options of its own. */
export function isPrompt(value: Prompt | RequestOptions): value is Prompt {
  return typeof value === "string" || Array.isArray(value) || !("prompt" in value);
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
  if (jsonSchema !== undefined) return { $case: "jsonSchema", value: jsonText(jsonSchema) };
  if (structuralTag !== undefined) return { $case: "structuralTag", value: jsonText(structuralTag) };
  if (regex !== undefined) return { $case: "regex", value: regex };
  if (grammar !== undefined) return { $case: "grammar", value: grammar };
  if (choice !== undefined) return { $case: "choice", value: { choices: [...choice] } };
  return undefined;
}

function jsonText(value: Json): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

type Given<Name extends keyof GenerateOptions> = { [Each in Name]?: Mutable<NonNullable<GenerateOptions[Each]>> };
type Mutable<Value> = Value extends readonly (infer Item)[] ? Item[] : Value;

/** The options of a group that are given, checked. */
function picked<Name extends keyof GenerateOptions>(
  kinds: Readonly<Record<Name, Kind>>,
  options: GenerateOptions,
): Given<Name> {
  const found: Record<string, unknown> = {};
  for (const name of Object.keys(kinds) as Name[]) {
    const value = options[name];
    if (value === undefined) continue;
    check(value, kinds[name], name);
    found[name] = value;
  }
  return found as Given<Name>;
}

function check(value: unknown, kind: Kind, name: string): void {
  switch (kind) {
    case "boolean":
    case "string":
      if (typeof value !== kind) throw InvalidFieldError.of(name, `must be a ${kind}`);
      break;
    case "object":
      if (value === null || !["object", "string"].includes(typeof value)) {
        throw InvalidFieldError.of(name, "must be an object");
      }
      break;
    case "numbers":
      for (const each of list(value, name)) checkNumber(each, "int32", name);
      break;
    case "texts":
    case "strings":
      if (kind === "texts" && typeof value === "string") break;
      if (!list(value, name).every((each) => typeof each === "string")) {
        throw InvalidFieldError.of(name, "must be a list of strings");
      }
      break;
    case "seed":
      if (typeof value !== "bigint" && !Number.isSafeInteger(value)) {
        throw InvalidFieldError.of(name, "must be a bigint or a whole number that is exact");
      }
      if (BigInt.asIntN(64, BigInt(value as number)) !== BigInt(value as number)) {
        throw InvalidFieldError.of(name, "must fit into 64 bits");
      }
      break;
    case "milliseconds":
      break; // checked where it is converted
    default:
      checkNumber(value, kind, name);
  }
}

function list(value: unknown, name: string): readonly unknown[] {
  if (!Array.isArray(value)) throw InvalidFieldError.of(name, "must be a list");
  return value as readonly unknown[];
}

function isEmpty(options: object): boolean {
  return Object.keys(options).length === 0;
}
