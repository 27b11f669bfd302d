/** The element types of tensors, by safetensors' names. */

const ITEM_BYTES = {
  BOOL: 1,
  U8: 1,
  I8: 1,
  F8_E5M2: 1,
  F8_E4M3: 1,
  F8_E8M0: 1,
  F8_E4M3FNUZ: 1,
  F8_E5M2FNUZ: 1,
  I16: 2,
  U16: 2,
  F16: 2,
  BF16: 2,
  I32: 4,
  U32: 4,
  F32: 4,
  C64: 8,
  F64: 8,
  I64: 8,
  U64: 8,
} as const;

/** safetensors' name of an element type. */
export type Dtype = keyof typeof ITEM_BYTES;

/** Whether a type is one that a push can bring. */
export function isDtype(name: unknown): name is Dtype {
  return typeof name === "string" && Object.hasOwn(ITEM_BYTES, name);
}

/** The number of bytes of a tensor. */
export function sizeBytesOf(dtype: Dtype, shape: readonly number[]): number {
  return shape.reduce((product, size) => product * size, ITEM_BYTES[dtype]);
}
