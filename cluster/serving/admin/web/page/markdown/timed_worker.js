// A worker that answers one message after the other, each within a limited time.

const SCRIPTS = {
  lexer: new URL("./lexer_worker.js", import.meta.url).href,
  highlighter: new URL("./highlighter_worker.js", import.meta.url).href,
};

// The content security policy allows this policy only, which knows these scripts.
const policy = globalThis.trustedTypes?.createPolicy("pagedray-worker", {
  createScriptURL: (name) => SCRIPTS[name],
});

export class TimedWorker {
  #name;
  #limitMs;
  #worker = null;
  #queue = [];
  #isBusy = false;

  constructor(name, limitMs) {
    this.#name = name;
    this.#limitMs = limitMs;
  }

  /** Return the answer to a message; null if there is none within the limit. */
  ask(message) {
    return new Promise((resolve) => {
      this.#queue.push({ message, resolve });
      this.#work();
    });
  }

  async #work() {
    if (this.#isBusy) return;
    this.#isBusy = true;
    while (this.#queue.length > 0) {
      const { message, resolve } = this.#queue.shift();
      resolve(await this.#answer(message));
    }
    this.#isBusy = false;
  }

  async #answer(message) {
    this.#worker ??= await startWorker(this.#name);
    if (this.#worker === null) return null;
    const answer = answerOf(this.#worker, this.#limitMs);
    this.#worker.postMessage(message);
    try {
      return await answer;
    } catch {
      this.#worker.terminate();
      this.#worker = null;
      return null;
    }
  }
}

/** Return a worker that has loaded its scripts, or null. */
async function startWorker(name) {
  const url = policy?.createScriptURL(name) ?? SCRIPTS[name];
  try {
    const worker = new Worker(url, { type: "module" });
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
