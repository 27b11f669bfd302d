/** Messages and grpc-js clients of the wire contract, as generated: for calls that `Client` does not have. */

export * from "./wire/genserve/v1/control.js";
export * from "./wire/genserve/v1/fleet.js";
export * from "./wire/genserve/v1/generation.js";
export * from "./wire/genserve/v1/types.js";
export * from "./wire/genserve/v1/weights.js";
