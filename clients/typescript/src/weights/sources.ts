/** Tensors that can be sent, and tensors in memory. */

import { InvalidFieldError } from "../errors.js";
import { shown } from "../transport/fields.js";
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
  return Object.entries(tensors).map(([name, tensor]) => {
    const field = `tensors[${JSON.stringify(name)}]`;
    const { dtype, shape, data } = checkTensor(tensor, field);
    const sizeBytes = sizeBytesOf(dtype, shape);
    if (data.byteLength !== sizeBytes) {
      throw InvalidFieldError.of(field, `${data.byteLength} bytes are not ${dtype} of shape [${shape.join(", ")}]`);
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

/** A program in JavaScript may give anything, such as an ArrayBuffer, which has a length but cannot be read as a view. */
function checkTensor(tensor: unknown, field: string): Tensor {
  const { dtype, shape, data } = (tensor ?? {}) as Partial<Record<keyof Tensor, unknown>>;
  if (!isDtype(dtype)) throw InvalidFieldError.of(field, `dtype ${shown(dtype)} is unknown`);
  if (!Array.isArray(shape) || !shape.every((size) => Number.isSafeInteger(size) && (size as number) >= 0)) {
    throw InvalidFieldError.of(field, "the shape must be a list of whole numbers");
  }
  if (!ArrayBuffer.isView(data)) {
    throw InvalidFieldError.of(field, "the data must be a typed array, a Buffer or a DataView");
  }
  return { dtype, shape: shape as number[], data };
}
