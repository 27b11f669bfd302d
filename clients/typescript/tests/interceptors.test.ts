import { Client, InterceptingCall, type Interceptor, type Tensor } from "genserve";
import { afterAll, beforeAll, expect, test } from "vitest";
import { digestsOf, randomTensors } from "./checkpoints.js";
import { ScriptedDaemon } from "./scripted-daemon.js";

let daemon: ScriptedDaemon;

beforeAll(async () => {
  daemon = await ScriptedDaemon.start();
});
afterAll(async () => {
  await daemon.stop();
});

/** Appends `mark` and the name of each call to `seen` when the call begins, and its status when it has ended. */
function noting(seen: string[], mark: string): Interceptor {
  return (options, nextCall) => {
    const call = options.method_definition.path.replace(/.*\//, "");
    return new InterceptingCall(nextCall(options), {
      start: (metadata, _listener, next) => {
        seen.push(`${mark} ${call}`);
        next(metadata, {
          onReceiveStatus: (status, passOn) => {
            seen.push(`${mark} ${call} ${status.code}`);
            passOn(status);
          },
        });
      },
    });
  };
}

test("interceptors see every call of a client, the first of them first", async () => {
  const seen: string[] = [];
  using client = new Client(daemon.address, { interceptors: [noting(seen, "outer"), noting(seen, "inner")] });
  await client.status();
  await client.generate("hello");
  await client.generateMany(["hello"]);
  const calls = ["GetStatus", "Generate", "GenerateMany"];
  expect(seen).toEqual(
    calls.flatMap((call) => [`outer ${call}`, `inner ${call}`, `inner ${call} 0`, `outer ${call} 0`]),
  );
});

test("a push through an interceptor arrives, and is seen once", async () => {
  const seen: string[] = [];
  using client = new Client(daemon.address, { interceptors: [noting(seen, "the")] });
  const tensors: Record<string, Tensor> = randomTensors();
  await client.pushTensors(tensors, { version: 1 });
  expect((await daemon.engine()).live).toEqual(digestsOf(tensors));
  expect(seen).toEqual(["the PushWeights", "the PushWeights 0"]);
});

test("an interceptor can add metadata, as a token that another program renews", async () => {
  let authorization: unknown;
  const renewed: Interceptor = (options, nextCall) =>
    new InterceptingCall(nextCall(options), {
      start: (metadata, listener, next) => {
        metadata.set("authorization", "Bearer renewed");
        authorization = metadata.get("authorization");
        next(metadata, listener);
      },
    });
  using client = new Client(daemon.address, { token: "old", interceptors: [renewed] });
  await client.status();
  expect(authorization).toEqual(["Bearer renewed"]);
});
