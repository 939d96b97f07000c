// The server's API. It alone has the API key, in memory: a key is never stored.

const TIMEOUT_MS = 5000;
const UNREACHABLE = "The server cannot be reached.";
const LOST = "The connection to the server was lost; the answer is incomplete.";
/** The pauses before a cut stream is resumed; the server keeps it for 30 s. */
const PAUSES_MS = [100, 500, 1000, 2000, 4000, 4000, 4000, 4000, 4000, 4000];

/** What the server answered instead of what was asked for; its status is 0 without an answer. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Server {
  #key = "";
  #isResumable = true;

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
      throw new ServerError(UNREACHABLE, 0);
    }
    if (!response.ok) throw await errorOf(response);
    return response.json();
  }

  /**
   * Yield the chunks of a chat completion, and null whenever the connection was cut and the stream
   * is about to be resumed. Throws ServerError, or AbortError once aborted.
   */
  async *complete(body, signal) {
    const options = { ...body.stream_options, resumable: this.#isResumable };
    const text = JSON.stringify({ ...body, stream_options: options });
    const id = Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("-");
    const headers = this.#headers({ "content-type": "application/json", "x-request-id": id });
    signal.addEventListener("abort", () => this.#abort(id), { once: true });
    let hasBegun = false;
    for (let numCuts = 0; ; numCuts += 1) {
      try {
        const response = await fetch("v1/chat/completions", { method: "POST", headers, body: text, signal });
        if (response.status === 501 && this.#isResumable) {
          this.#isResumable = false;
          return yield* this.complete(body, signal);
        }
        if (response.status === 204) return;
        if (!response.ok && numCuts === 0) throw await errorOf(response);
        // The server does not know the stream.
        if (response.status === 404) throw new ServerError(hasBegun ? LOST : UNREACHABLE, 0);
        if (response.ok) {
          hasBegun = true;
          for await (const { id: number, data } of eventsOf(response.body)) {
            if (data === "[DONE]") return;
            const chunk = JSON.parse(data);
            if (chunk.error) throw new ServerError(String(chunk.error.message), response.status);
            yield chunk;
            headers["last-event-id"] = number;
            numCuts = 0;
          }
        }
      } catch (error) {
        if (signal.aborted || error instanceof ServerError) throw error;
      }
      if (!hasBegun && numCuts > 0) throw new ServerError(UNREACHABLE, 0);
      if (!this.#isResumable || numCuts === PAUSES_MS.length) throw new ServerError(LOST, 0);
      // If no event has arrived, the request may not have arrived either.
      headers["last-event-id"] ??= "0";
      yield null;
      await new Promise((wake) => {
        setTimeout(wake, PAUSES_MS[numCuts]);
        signal.addEventListener("abort", wake, { once: true });
      });
    }
  }

  /** End a request, which the server would otherwise finish without its client. */
  #abort(id) {
    const ending = { method: "DELETE", headers: this.#headers(), keepalive: true };
    fetch(`v1/streams/${id}`, ending).catch(() => {});
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

/** Yield the events `{ id, data }` in the body of a response; the id is that of the last `id:` line. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    let id = null;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("id:")) id = line.slice(3).trim();
        if (line.startsWith("data:")) yield { id, data: line.slice(5).trim() };
      }
    }
  } finally {
    // Events after the last that was read are not wanted.
    reader.cancel().catch(() => {});
  }
}
