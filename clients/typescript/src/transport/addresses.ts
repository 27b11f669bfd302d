/** Addresses of the network, as gRPC writes them. Nothing is resolved. */

/** Whether an address is that of a Unix socket, and not of a host whose name begins so. */
export function isSocket(address: string): boolean {
  return /^unix(-abstract)?:/.test(address);
}

/** The parts of HOST:PORT; undefined for what is written otherwise, such as a socket or several addresses. */
export function hostAndPort(address: string): { host: string; port: string } | undefined {
  if (isSocket(address)) return undefined;
  const parts = /^([^:/[\]]+|\[[^[\]]+\]):([^:/]*)$/.exec(address.replace(/^(dns:(\/\/\/)?|ipv4:|ipv6:)/, ""));
  return parts === null ? undefined : { host: parts[1] ?? "", port: parts[2] ?? "" };
}

/** Whether an address is of this host alone: a Unix socket, localhost or a loopback address. */
export function isLocal(address: string): boolean {
  if (isSocket(address)) return true;
  const host = address
    .replace(/^(dns:(\/\/\/)?|ipv4:|ipv6:)/, "")
    .replace(/:[^:]*$/, "")
    .replace(/^\[(.*)\]$/, "$1");
  return host === "localhost" || host === "::1" || /^127\.\d{1,3}\.\d{1,3}\.\d{1,3}$/.test(host);
}
