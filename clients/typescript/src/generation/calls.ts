/** The calls of GenerationService. */

import { randomUUID } from "node:crypto";
import { GenserveError, InvalidFieldError, QueueFullError } from "../errors.js";
import type { Connection } from "../transport/connection.js";
import { errorOfStatus } from "../transport/status.js";
import { CALL, checkOptions, checkTexts, checkTokenIds } from "../transport/options.js";
import { type CallOptions, limited } from "../transport/timeouts.js";
import {
  type GenerateManyItem,
  type GenerateRequest,
  GenerationServiceService,
} from "../wire/genserve/v1/generation.js";
import { ManyStream } from "./many-stream.js";
import type { ChatMessage, GenerateOptions, Prompt, RequestOptions } from "./options.js";
import { generateRequest, isPrompt, tokenizeRequest, type TokenizeOptions } from "./request.js";
import { type Delta, deltaOf, Generation } from "./results.js";
import { Submissions } from "./submissions.js";

/** The answer to one of many prompts, and the place of the prompt among them. */
export interface CompletedGeneration {
  index: number;
  generation: Generation;
}

/** Options of many requests, which share them. */
export type GenerateManyOptions = Omit<GenerateOptions, "requestId">;

/** Requests that were running and are ended, and ids that were not running. */
export interface AbortResult {
  abortedIds: string[];
  unknownIds: string[];
}

/** Generation of tokens. */
export class GenerationCalls {
  readonly #connection: Connection;

  constructor(connection: Connection) {
    this.#connection = connection;
  }

  async generate(prompt: Prompt, options: GenerateOptions): Promise<Generation> {
    const generation = new Generation();
    for await (const delta of this.stream(prompt, { ...options, streamInterval: options.streamInterval ?? 0 })) {
      generation.add(delta);
    }
    if (generation.usage === undefined) throw new GenserveError("the daemon ended the stream before the request");
    return generation;
  }

  stream(prompt: Prompt, options: GenerateOptions): AsyncGenerator<Delta, void, undefined> {
    return this.#deltas(generateRequest(prompt, options), options);
  }

  async generateMany(prompts: Iterable<Prompt | RequestOptions>, options: GenerateManyOptions): Promise<Generation[]> {
    const generations: Generation[] = [];
    for await (const { index, generation } of this.generateAsCompleted(prompts, options)) {
      generations[index] = generation;
    }
    return generations;
  }

  generateAsCompleted(
    prompts: Iterable<Prompt | RequestOptions>,
    options: GenerateManyOptions,
  ): AsyncGenerator<CompletedGeneration, void, undefined> {
    if (typeof prompts !== "object" || !(Symbol.iterator in prompts)) {
      throw InvalidFieldError.of("prompts", "must be a list of prompts, and not one prompt");
    }
    const shared = { ...options, streamInterval: options.streamInterval ?? 0 };
    const prefix = randomUUID();
    const requests = Array.from(prompts, (each, index) => {
      const { prompt, ...own } = isPrompt(each) ? { prompt: each } : each;
      return generateRequest(prompt, { requestId: `${prefix}-${index}`, ...shared, ...ownOptions(own) });
    });
    if (new Set(requests.map(({ requestId }) => requestId)).size < requests.length) {
      throw InvalidFieldError.of("requestId", "is that of two requests");
    }
    return this.#completed(requests, options);
  }

  streamMany(options: CallOptions): ManyStream {
    checkOptions(options, CALL);
    const timed = limited(options, this.#connection.timeouts.generateMs);
    const call = this.#connection.duplex(GenerationServiceService.generateMany, timed);
    return new ManyStream(this.#connection, call, (requestIds) => this.abort(requestIds, {}));
  }

  async abort(
    requestIds: readonly string[],
    options: CallOptions & { all?: boolean | undefined },
  ): Promise<AbortResult> {
    checkOptions(options, { ...CALL, all: "boolean" });
    const request = { requestIds: [...checkTexts(requestIds, "requestIds")], all: options.all ?? false };
    const method = GenerationServiceService.abort;
    const { abortedIds, unknownIds } = await this.#connection.unary(method, request, options);
    return { abortedIds, unknownIds };
  }

  async tokenize(prompt: string | readonly ChatMessage[], options: TokenizeOptions): Promise<number[]> {
    const request = tokenizeRequest(prompt, options);
    return (await this.#connection.unary(GenerationServiceService.tokenize, request, options)).tokenIds;
  }

  async detokenize(
    tokenIds: readonly number[],
    options: CallOptions & { skipSpecialTokens?: boolean | undefined },
  ): Promise<string> {
    checkOptions(options, { ...CALL, skipSpecialTokens: "boolean" });
    const skipSpecialTokens = options.skipSpecialTokens ?? false;
    const request = { tokenIds: [...checkTokenIds(tokenIds, "tokenIds")], skipSpecialTokens };
    return (await this.#connection.unary(GenerationServiceService.detokenize, request, options)).text;
  }

  async *#deltas(request: GenerateRequest, options: CallOptions): AsyncGenerator<Delta, void, undefined> {
    let { requestId } = request;
    const timed = limited(options, this.#connection.timeouts.generateMs);
    for await (const response of this.#connection.responses(GenerationServiceService.generate, request, timed)) {
      const delta = deltaOf(response, requestId);
      requestId = delta.requestId;
      yield delta;
    }
  }

  async *#completed(
    requests: readonly GenerateRequest[],
    options: CallOptions,
  ): AsyncGenerator<CompletedGeneration, void, undefined> {
    const unfinished = new Map(
      requests.map(({ requestId }, index) => [requestId, { index, generation: new Generation() }]),
    );
    if (unfinished.size === 0) return;
    const timed = limited(options, this.#connection.timeouts.generateMs);
    const { call, responses } = this.#connection.duplex(GenerationServiceService.generateMany, timed);
    const submissions = new Submissions(call, requests);
    try {
      for await (const { items } of responses) {
        for (const item of items) {
          const completed = this.#add(item, unfinished.get(item.requestId), submissions);
          if (completed === undefined) continue;
          unfinished.delete(item.requestId);
          yield completed;
        }
      }
    } catch (error) {
      if (unfinished.size > 0) throw error; // else every answer is here, and only the end of the call was lost
    } finally {
      submissions.stop();
    }
    if (unfinished.size > 0) {
      throw new GenserveError(`the daemon ended the stream while ${unfinished.size} requests were running`);
    }
  }

  /** Adds an item to the request that it is about. Returns the request if nothing follows. */
  #add(
    { requestId, result }: GenerateManyItem,
    unfinished: CompletedGeneration | undefined,
    submissions: Submissions,
  ): CompletedGeneration | undefined {
    const error = result?.$case === "error" ? errorOfStatus(result.value, this.#connection.address) : undefined;
    if (unfinished === undefined) {
      throw error ?? new GenserveError(`the daemon answered for ${JSON.stringify(requestId)}, which is not running`);
    }
    const { generation } = unfinished;
    if (error instanceof QueueFullError && generation.prompt === undefined) {
      submissions.refused(requestId, error.retryAfterMs); // it has not begun
      return undefined;
    }
    if (result?.$case === "response") generation.add(deltaOf(result.value, requestId));
    if (error === undefined && generation.usage === undefined) return undefined;
    generation.requestId = requestId;
    generation.error = error;
    submissions.ended(requestId);
    return unfinished;
  }
}

/** Those that are given. Throws InvalidFieldError for one of the call. */
function ownOptions(options: Omit<RequestOptions, "prompt">): GenerateOptions {
  const given: GenerateOptions = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
  for (const name of ["timeoutMs", "signal"] as const) {
    if (name in given) throw InvalidFieldError.of(name, "is an option of all requests together");
  }
  return given;
}
