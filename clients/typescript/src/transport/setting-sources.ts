/** What the environment and the configuration file say about a connection. */

import { existsSync, readFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { parse } from "smol-toml";
import { InvalidFieldError } from "../errors.js";

/** The settings that can stand outside of a program. */
export interface Settings {
  target?: string | undefined;
  token?: string | undefined;
  tokenFile?: string | undefined;
  caFile?: string | undefined;
  certFile?: string | undefined;
  keyFile?: string | undefined;
  serverName?: string | undefined;
  tls?: boolean | undefined;
  allowInsecure?: boolean | undefined;
}

const TEXTS = ["target", "tokenFile", "caFile", "certFile", "keyFile", "serverName"] as const;
const SWITCHES = ["tls", "allowInsecure"] as const;
const BOOLEANS: Readonly<Record<string, boolean>> = {
  1: true,
  true: true,
  yes: true,
  0: false,
  false: false,
  no: false,
};

const SNAKE_CASE = new Map([...TEXTS, ...SWITCHES, "token" as const].map((name) => [name, snakeCase(name)]));

/** From GENSERVE_TARGET, GENSERVE_TOKEN, GENSERVE_CA_FILE and so on; an empty variable says nothing. */
export function fromEnvironment(environment: NodeJS.ProcessEnv): Settings {
  const found: Record<string, string | boolean> = {};
  for (const [name, snake] of SNAKE_CASE) {
    const variable = `GENSERVE_${snake.toUpperCase()}`;
    const text = environment[variable];
    if (text === undefined || text === "") continue;
    if (!isSwitch(name)) {
      found[name] = text;
      continue;
    }
    const word = text.toLowerCase();
    const value = Object.hasOwn(BOOLEANS, word) ? BOOLEANS[word] : undefined;
    if (value === undefined) throw InvalidFieldError.of(`$${variable}`, `must be 1 or 0, is ${JSON.stringify(text)}`);
    found[name] = value;
  }
  return found;
}

/** From the configuration file, if there is one. Paths in it begin at its directory. */
export function fromFile(environment: NodeJS.ProcessEnv): Settings {
  const named = environment["GENSERVE_CONFIG"];
  if (named === "") return {};
  const { XDG_CONFIG_HOME: configured = "", HOME: home = "/nonexistent" } = environment;
  const directory = configured === "" ? join(home, ".config") : configured;
  const path = named ?? join(directory, "genserve", "client.toml");
  if (named === undefined && !existsSync(path)) return {};
  let document: Record<string, unknown>;
  try {
    document = parse(readFileSync(path, "utf8"));
  } catch (error) {
    throw InvalidFieldError.of(path, (error as Error).message);
  }
  const names = new Map([...SNAKE_CASE].filter(([name]) => name !== "token").map(([name, snake]) => [snake, name]));
  const found: Record<string, string | boolean> = {};
  for (const [key, value] of Object.entries(document)) {
    const name = names.get(key);
    if (name === undefined) {
      throw InvalidFieldError.of(path, `unknown key ${JSON.stringify(key)}, known are ${[...names.keys()].join(", ")}`);
    }
    if (typeof value !== (isSwitch(name) ? "boolean" : "string")) {
      throw InvalidFieldError.of(path, `${key} must be a ${isSwitch(name) ? "boolean" : "string"}`);
    }
    found[name] = name.endsWith("File") ? resolve(dirname(path), value as string) : (value as string | boolean);
  }
  return found;
}

function isSwitch(name: string): boolean {
  return (SWITCHES as readonly string[]).includes(name);
}

function snakeCase(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}
