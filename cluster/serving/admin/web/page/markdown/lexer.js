// Has texts parsed by a worker.

import { TimedWorker } from "./timed_worker.js";

const LIMIT_MS = 3000;

class Lexer {
  #worker = new TimedWorker("lexer", LIMIT_MS);

  /** Return the tokens of a text; null if it cannot be parsed within the limit. */
  lex(text) {
    return this.#worker.ask(text);
  }
}

/** The lexer of all messages. */
export const lexer = new Lexer();
