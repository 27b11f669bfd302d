/** Enum values as words and back: `"keep"` here is `PAUSE_MODE_KEEP` on the wire. */

import { InvalidFieldError } from "../errors.js";
import { shown } from "./fields.js";

/** The words of an enum. */
export type Word<Enum> = Lowercase<Exclude<keyof Enum & string, "UNSPECIFIED">>;

/** The words of a value that a daemon sent: `unspecified` if it left it out, `unknown_9` if it is newer than this client. */
export type ReceivedWord<Enum> = Word<Enum> | "unspecified" | `unknown_${number}`;

type EnumObject = Readonly<Record<string, string | number>>;

/** The word for a value. */
export function wordOf<Enum extends EnumObject>(names: Enum, value: number): ReceivedWord<Enum> {
  const name = (names as Readonly<Record<number, string | number>>)[value];
  return typeof name === "string" ? (name.toLowerCase() as Word<Enum>) : `unknown_${value}`;
}

/** The value for a word; UNSPECIFIED for none. Throws InvalidFieldError naming `field`. */
export function valueOf<Enum extends EnumObject>(
  names: Enum,
  word: Word<Enum> | undefined,
  field: string,
): Extract<Enum[keyof Enum], number> {
  if (word === undefined) return 0 as Extract<Enum[keyof Enum], number>;
  const value = names[typeof word === "string" ? word.toUpperCase() : ""];
  if (typeof value !== "number" || value === 0) {
    const words = Object.keys(names).filter((name) => /^[A-Z]/.test(name) && names[name] !== 0);
    throw InvalidFieldError.of(field, `${shown(word)} is not one of ${words.join(", ").toLowerCase()}`);
  }
  return value as Extract<Enum[keyof Enum], number>;
}
