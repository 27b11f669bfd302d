/** Answers that no daemon gives, or that are lost on their way. */

import {
  Server,
  ServerCredentials,
  type ServerDuplexStream,
  type ServerWritableStream,
  status,
  type UntypedServiceImplementation,
} from "@grpc/grpc-js";
import { Client } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import {
  type GenerateManyRequest,
  GenerateManyResponse,
  type GenerateRequest,
  GenerateResponse,
  GenerationServiceService,
} from "../src/wire/genserve/v1/generation.js";

const server = new Server();
let client: Client;
let responses: GenerateResponse[] = [];

beforeAll(async () => {
  const calls: UntypedServiceImplementation = {
    generate: (call: ServerWritableStream<GenerateRequest, GenerateResponse>) => {
      for (const response of responses) call.write(response);
      call.end();
    },
    generateMany: (call: ServerDuplexStream<GenerateManyRequest, GenerateManyResponse>) => {
      call.on("data", ({ action }: GenerateManyRequest) => {
        const requestId = action?.$case === "generate" ? action.value.requestId : "";
        const value = GenerateResponse.fromPartial({ requestId, usage: { numOutputTokens: 1 } });
        call.write(GenerateManyResponse.fromPartial({ items: [{ requestId, result: { $case: "response", value } }] }));
      });
      call.on("end", () => call.emit("error", { code: status.UNAVAILABLE, details: "Connection dropped" }));
    },
  };
  const unused = Object.entries(GenerationServiceService).filter(([name]) => !(name in calls));
  server.addService(GenerationServiceService, {
    ...Object.fromEntries(unused.map(([name]) => [name, () => undefined])),
    ...calls,
  });
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) => {
      if (error === null) resolve(bound);
      else reject(error);
    });
  });
  client = new Client(`127.0.0.1:${port}`);
});
afterAll(() => {
  client.close();
  server.forceShutdown();
});

test("a generation that ends without its last message is an error", async () => {
  responses = [GenerateResponse.fromPartial({ requestId: "a", outputs: [{ tokenIds: [1] }] })];
  await expect(client.generate("a")).rejects.toThrow("the daemon ended the stream before the request");
});

test("a sequence that no request can have is an error, and takes no memory", async () => {
  responses = [GenerateResponse.fromPartial({ outputs: [{ index: 2 ** 32 - 1 }] })];
  await expect(client.generate("a")).rejects.toThrow("the daemon answered with sequence 4294967295");
});

test("a connection that breaks after the last of many answers loses none", async () => {
  const generations = await client.generateMany(["a", "b"]);
  expect(generations.map(({ usage }) => usage?.numOutputTokens)).toEqual([1, 1]);
});
