// Has texts parsed by the worker, one after the other, each for a limited time.

const LIMIT_MS = 3000;
const WORKER_URL = new URL("./worker.js", import.meta.url).href;

// The content security policy allows this policy only, which knows one script.
const policy = globalThis.trustedTypes?.createPolicy("pagedray-worker", {
  createScriptURL: () => WORKER_URL,
});

class Lexer {
  #worker = null;
  #queue = [];
  #isBusy = false;

  /** Return the tokens of a text; null if it cannot be parsed within the limit. */
  lex(text) {
    return new Promise((resolve) => {
      this.#queue.push({ text, resolve });
      this.#work();
    });
  }

  async #work() {
    if (this.#isBusy) return;
    this.#isBusy = true;
    while (this.#queue.length > 0) {
      const { text, resolve } = this.#queue.shift();
      resolve(await this.#parse(text));
    }
    this.#isBusy = false;
  }

  async #parse(text) {
    this.#worker ??= await startWorker();
    if (this.#worker === null) return null;
    const parsed = answerOf(this.#worker, LIMIT_MS);
    this.#worker.postMessage(text);
    try {
      return await parsed;
    } catch {
      this.#worker.terminate();
      this.#worker = null;
      return null;
    }
  }
}

/** Return a worker that has loaded its scripts, or null. */
async function startWorker() {
  const worker = new Worker(policy?.createScriptURL("") ?? WORKER_URL, { type: "module" });
  try {
    await answerOf(worker);
    return worker;
  } catch {
    return null;
  }
}

/** Return the next message of a worker. Throws if it fails or takes longer than a limit. */
function answerOf(worker, limitMs = null) {
  return new Promise((resolve, reject) => {
    const timer = limitMs === null ? 0 : setTimeout(reject, limitMs);
    worker.onerror = reject;
    worker.onmessage = ({ data }) => {
      clearTimeout(timer);
      resolve(data);
    };
  });
}

/** The lexer of all messages. */
export const lexer = new Lexer();
