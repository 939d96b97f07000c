// The server's API. It alone has the API key, in memory: a key is never stored.

import { eventsOf } from "./event_stream.js";

const TIMEOUT_MS = 5000;

/** What the server answered instead of what was asked for; its status is 0 without an answer. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Server {
  #key = "";

  get hasKey() {
    return this.#key !== "";
  }

  set key(key) {
    this.#key = key.trim();
  }

  /** Return the JSON at a path. Throws ServerError. */
  async read(path) {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    let response;
    try {
      response = await fetch(path, { headers: this.#headers(), signal, cache: "no-store" });
    } catch {
      throw new ServerError("The server cannot be reached.", 0);
    }
    if (!response.ok) throw await errorOf(response);
    return response.json();
  }

  /** Yield the chunks of a chat completion. Throws ServerError, or AbortError once aborted. */
  async *complete(body, signal) {
    let response;
    try {
      response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: this.#headers({ "content-type": "application/json" }),
        body: JSON.stringify(body),
        signal,
      });
    } catch (error) {
      if (signal.aborted) throw error;
      throw new ServerError("The server cannot be reached.", 0);
    }
    if (!response.ok) throw await errorOf(response);
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(String(chunk.error.message), response.status);
      yield chunk;
    }
  }

  #headers(more = {}) {
    return this.hasKey ? { ...more, authorization: `Bearer ${this.#key}` } : more;
  }
}

async function errorOf(response) {
  let message = `The server returned status ${response.status}.`;
  try {
    const body = await response.json();
    if (typeof body.error?.message === "string") message = body.error.message;
  } catch {
    // The body is not JSON, such as that of a proxy.
  }
  return new ServerError(message, response.status);
}
