import { readFileSync, statSync } from "node:fs";
import { InvalidFieldError } from "../errors.js";

/** Throws InvalidFieldError, which does not contain the token, unless it can be sent. */
export function checkToken(token: string, field: string): string {
  if (!/^[!-~]+$/.test(token)) throw InvalidFieldError.of(field, "must be printable ASCII without spaces");
  return token;
}

/** The token that a file holds, read again when the file changes. */
export class TokenFile {
  readonly #path: string;
  #seen = "";
  #token: string;

  constructor(path: string) {
    this.#path = path;
    this.#token = this.#read();
  }

  /** The token. A file that has become invalid changes nothing, and a warning of the process says why. */
  get token(): string {
    try {
      if (this.#identity() !== this.#seen) this.#token = this.#read();
    } catch (error) {
      process.emitWarning(`${(error as Error).message}. The token of before stays`);
    }
    return this.#token;
  }

  #read(): string {
    let text: string;
    try {
      this.#seen = this.#identity(); // first: a change while it is read is seen the next time
      text = readFileSync(this.#path, "latin1").trim();
    } catch (error) {
      throw InvalidFieldError.of("tokenFile", (error as Error).message);
    }
    return checkToken(text, `the token of ${this.#path}`);
  }

  #identity(): string {
    const { ino, size, mtimeMs } = statSync(this.#path);
    return `${ino} ${size} ${mtimeMs}`;
  }
}
