/** Tensors that can be sent, and tensors in memory. */

import { InvalidFieldError } from "../errors.js";
import { type Dtype, isDtype, sizeBytesOf } from "./dtypes.js";

/** A tensor, and a way to get its bytes. */
export interface TensorSource {
  readonly name: string;
  readonly dtype: Dtype;
  /** Outermost dimension first; empty for a scalar. */
  readonly shape: readonly number[];
  readonly sizeBytes: number;
  /** Fills `target` with the bytes from `position` on. Row-major, little-endian. */
  read(target: Uint8Array, position: number): Promise<void> | void;
}

/** A tensor in memory: row-major and little-endian. */
export interface Tensor {
  dtype: Dtype;
  /** Outermost dimension first; empty for a scalar. */
  shape: readonly number[];
  /** Its bytes, or a typed array over them. They must not change before the push has ended. */
  data: ArrayBufferView;
}

/** Tensors in memory by their names in the checkpoint. Throws InvalidFieldError. */
export function memorySources(tensors: Readonly<Record<string, Tensor>>): TensorSource[] {
  return Object.entries(tensors).map(([name, { dtype, shape, data }]) => {
    const field = `tensors[${JSON.stringify(name)}]`;
    if (!isDtype(dtype)) throw InvalidFieldError.of(field, `dtype ${JSON.stringify(dtype)} is unknown`);
    const sizeBytes = sizeBytesOf(dtype, shape);
    if (!shape.every((size) => Number.isSafeInteger(size) && size >= 0) || data.byteLength !== sizeBytes) {
      const given = `${data.byteLength} bytes`;
      throw InvalidFieldError.of(field, `${given} are not ${dtype} of shape [${shape.join(", ")}]`);
    }
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    return {
      name,
      dtype,
      shape,
      sizeBytes,
      read: (target: Uint8Array, position: number) => {
        target.set(bytes.subarray(position, position + target.length));
      },
    };
  });
}
