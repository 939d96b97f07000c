// Has texts parsed by a worker, which returns their tokens, or null after a limit.

import { TimedWorker } from "./timed_worker.js";

/** The lexer of all messages. */
export const lexer = new TimedWorker("lexer", 3000);
