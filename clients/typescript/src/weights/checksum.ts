import type { Checksum } from "./chunk-frame.js";

let loading: Promise<Checksum | undefined> | undefined;

/** CRC32C (Castagnoli), computed natively; undefined, with a warning of the process, where that cannot be loaded. */
export function loadChecksum(): Promise<Checksum | undefined> {
  loading ??= import("@node-rs/crc32").then(
    ({ crc32c }) => crc32c as Checksum,
    () => {
      process.emitWarning("@node-rs/crc32 does not load here: a push relies on the transport's checksums");
      return undefined;
    },
  );
  return loading;
}
