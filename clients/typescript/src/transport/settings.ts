/**
 * How a client reaches a daemon: from its arguments, the environment and a file, in this order.
 *
 * The variables are GENSERVE_ and the name of a setting, such as GENSERVE_TARGET or GENSERVE_TOKEN_FILE. The file is
 * $GENSERVE_CONFIG, or genserve/client.toml in $XDG_CONFIG_HOME or ~/.config. It has the same settings, but no token.
 */

import { readFileSync } from "node:fs";
import { type ChannelCredentials, type ChannelOptions, credentials, type Interceptor, Metadata } from "@grpc/grpc-js";
import { InvalidFieldError } from "../errors.js";
import { hostAndPort, isLocal, isSocket } from "./addresses.js";
import { checkOptions, checkText, type Kinds } from "./options.js";
import { fromEnvironment, fromFile, type Settings } from "./setting-sources.js";
import type { GivenTimeouts } from "./timeouts.js";
import { TokenFile, checkToken } from "./token.js";

const DEFAULT_ADDRESS = "127.0.0.1:50051";

/** A PEM document. */
export type Pem = string | Uint8Array;

/** How to reach the daemon. What is not given comes from the environment or the configuration file. */
export interface ConnectionOptions {
  /** TLS with the root certificates of Node. */
  tls?: boolean | undefined;
  /** Certificate authorities of the daemon, as PEM, instead of Node's; implies TLS. */
  ca?: Pem | undefined;
  /** PEM file with them. */
  caFile?: string | undefined;
  /** The client's own certificate and its chain, as PEM, for a daemon that requires one; implies TLS. */
  cert?: Pem | undefined;
  /** PEM file with them. */
  certFile?: string | undefined;
  /** The key of the certificate, as PEM, unless it stands with the certificate. */
  key?: Pem | undefined;
  /** PEM file with it. */
  keyFile?: string | undefined;
  /** Name that the daemon's certificate has, if it is not the host in the address. */
  serverName?: string | undefined;
  /** Bearer token, sent with every call; "" = none, whatever the environment has. */
  token?: string | undefined;
  /** File that holds the token alone. It is read again when it changes. */
  tokenFile?: string | undefined;
  /** Send the token to another host without TLS, too. */
  allowInsecure?: boolean | undefined;
  /** Further metadata, sent with every call. */
  metadata?: Readonly<Record<string, string>> | undefined;
  /** Limits of calls without a `timeoutMs`. */
  timeouts?: GivenTimeouts | undefined;
  /** Channel options of gRPC, which override those of the client. */
  channelOptions?: ChannelOptions | undefined;
  /** Interceptors of grpc-js for every call, the outermost first. A push gives them its encoded frames. */
  interceptors?: readonly Interceptor[] | undefined;
}

/** Where a daemon is, and how it is called. */
export interface Reach {
  readonly address: string;
  readonly credentials: ChannelCredentials;
  readonly channelOptions: ChannelOptions;
  readonly interceptors: Interceptor[];
  /** What goes with a call that begins now. */
  metadata(): [key: string, value: string][];
}

/** What is decided together: the first source that says anything of a group decides all of it. */
const TLS_GROUP = ["tls", "ca", "caFile", "cert", "certFile", "key", "keyFile", "serverName"] as const;
const TOKEN_GROUP = ["token", "tokenFile"] as const;
const INSECURE_GROUP = ["allowInsecure"] as const;
const OPTIONS: Kinds<ConnectionOptions> = {
  tls: "boolean",
  ca: "pem",
  caFile: "string",
  cert: "pem",
  certFile: "string",
  key: "pem",
  keyFile: "string",
  serverName: "string",
  token: "string",
  tokenFile: "string",
  allowInsecure: "boolean",
  metadata: "object",
  timeouts: "object",
  channelOptions: "object",
  interceptors: "functions",
};

/** Arguments, environment and file together. Throws InvalidFieldError naming what is wrong. */
export function reachOf(
  given: string | undefined,
  options: ConnectionOptions,
  environment: NodeJS.ProcessEnv = process.env,
): Reach {
  checkOptions(options, OPTIONS);
  checkMetadata(options.metadata ?? {});
  const ofEnvironment = fromEnvironment(environment);
  let ofFile = fromFile(environment);
  const address = checkAddress(given ?? ofEnvironment.target ?? ofFile.target ?? DEFAULT_ADDRESS);
  // What the file has for its own target is for no other.
  if (ofFile.target !== undefined && ofFile.target !== address) ofFile = {};
  const sources: (ConnectionOptions & Settings)[] = [options, ofEnvironment, ofFile];
  const tls = firstWith(TLS_GROUP, sources);
  const { token: said, tokenFile } = firstWith(TOKEN_GROUP, sources);
  const token = said === "" ? undefined : said;
  const { allowInsecure } = firstWith(INSECURE_GROUP, sources);

  const file = token === undefined && tokenFile !== undefined ? new TokenFile(tokenFile) : undefined;
  if (token !== undefined) checkToken(token, "token");
  const usesTls = !isSocket(address) && isTls(tls);
  const hasToken = token !== undefined || file !== undefined;
  if (hasToken && !usesTls && allowInsecure !== true && !isLocal(address)) {
    throw InvalidFieldError.of(
      "token",
      `would go to ${address} unencrypted, where others could read it: use TLS, or allowInsecure`,
    );
  }
  return {
    address,
    credentials: usesTls ? tlsCredentials(tls) : credentials.createInsecure(),
    channelOptions: {
      ...(tls.serverName === undefined ? {} : { "grpc.ssl_target_name_override": tls.serverName }),
      ...options.channelOptions,
    },
    interceptors: [...(options.interceptors ?? [])],
    metadata() {
      const bearer = token ?? file?.token;
      const entries = Object.entries(options.metadata ?? {});
      return bearer === undefined ? entries : [...entries, ["authorization", `Bearer ${bearer}`]];
    },
  };
}

function checkAddress(address: unknown): string {
  if (typeof address !== "string" || !/^[\x21-\x7e]+$/.test(address)) {
    throw InvalidFieldError.of("address", `${JSON.stringify(address)} is not an address`);
  }
  if (/^https?:/.test(address) || !address.includes(":")) {
    throw InvalidFieldError.of("address", `${JSON.stringify(address)} is not an address of gRPC: write HOST:PORT`);
  }
  const port = hostAndPort(address)?.port;
  if (port !== undefined && !(/^\d{1,5}$/.test(port) && 0 < +port && +port <= 65535)) {
    throw InvalidFieldError.of("address", `${JSON.stringify(address)} has no port from 1 to 65535: write HOST:PORT`);
  }
  return address;
}

function checkMetadata(given: Readonly<Record<string, string>>): void {
  const metadata = new Metadata();
  for (const [key, value] of Object.entries(given)) {
    try {
      metadata.set(key, checkText(value, `metadata.${key}`));
    } catch (error) {
      throw error instanceof InvalidFieldError ? error : InvalidFieldError.of("metadata", (error as Error).message);
    }
  }
}

function firstWith<Source, Name extends keyof Source>(names: readonly Name[], sources: Source[]): Pick<Source, Name> {
  const source = sources.find((each) => names.some((name) => each[name] !== undefined));
  return Object.fromEntries(names.map((name) => [name, source?.[name]])) as Pick<Source, Name>;
}

type TlsSettings = Pick<ConnectionOptions, (typeof TLS_GROUP)[number]>;

function isTls({ tls, ca, caFile, cert, certFile, key, keyFile, serverName }: TlsSettings): boolean {
  const hasCertificate = cert !== undefined || certFile !== undefined;
  if (!hasCertificate && (key !== undefined || keyFile !== undefined)) {
    throw InvalidFieldError.of("key", "is the key of no certificate: give its certificate, too");
  }
  const usesTls = tls === true || ca !== undefined || caFile !== undefined || hasCertificate;
  if (serverName !== undefined && !usesTls) {
    throw InvalidFieldError.of(
      "serverName",
      "is the name in a certificate, and without TLS there is none: set tls, too",
    );
  }
  return usesTls;
}

function tlsCredentials({ ca, caFile, cert, certFile, key, keyFile }: TlsSettings): ChannelCredentials {
  const roots = pem(ca, caFile, ca === undefined ? "caFile" : "ca");
  const chain = pem(cert, certFile, cert === undefined ? "certFile" : "cert");
  const privateKey = pem(key, keyFile, key === undefined ? "keyFile" : "key", "PRIVATE KEY") ?? chain;
  if (privateKey?.includes("PRIVATE KEY-----") === false) {
    throw InvalidFieldError.of("cert", "has no key with it: give keyFile or key, too");
  }
  try {
    return credentials.createSsl(roots, privateKey, chain);
  } catch (error) {
    throw InvalidFieldError.of("cert", (error as Error).message);
  }
}

function pem(value: Pem | undefined, path: string | undefined, field: string, kind = "CERTIFICATE"): Buffer | null {
  const document = value !== undefined ? Buffer.from(value) : path !== undefined ? fileAt(path, field) : null;
  // Node takes a document of another kind for no certificate, and then trusts nobody.
  if (document?.includes(`${kind}-----`) === false) {
    const where = value === undefined ? `${path ?? ""}: ` : "";
    throw InvalidFieldError.of(field, `${where}is not a PEM document with a ${kind.toLowerCase()}`);
  }
  return document;
}

function fileAt(path: string, field: string): Buffer {
  try {
    return readFileSync(path);
  } catch (error) {
    throw InvalidFieldError.of(field, (error as Error).message);
  }
}
