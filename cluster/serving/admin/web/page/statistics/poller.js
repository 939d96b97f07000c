// Reads the server's load every second and its history every five, while the page is visible.

const POLL_MS = 1000;
const HISTORY_MS = 5000;

export class Poller {
  #server;
  #on;
  #timer = 0;
  #info = null;
  #historyMs = -Infinity;
  #round = 0;

  /** `on` has a function for each result: `info`, `loads`, `history` (null if it is not allowed), `problem`. */
  constructor(server, on) {
    this.#server = server;
    this.#on = on;
  }

  start() {
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.refresh();
    });
    this.refresh();
  }

  /** Read everything now, such as after a key was entered. */
  async refresh() {
    clearTimeout(this.#timer);
    const round = (this.#round += 1);
    this.#historyMs = -Infinity;
    while (round === this.#round && !document.hidden) {
      try {
        await this.#read();
      } catch (error) {
        this.#on.problem(error);
      }
      await new Promise((wake) => {
        this.#timer = setTimeout(wake, POLL_MS);
      });
    }
  }

  async #read() {
    const loads = await this.#server.read("loads");
    if (this.#info === null) {
      this.#info = await this.#server.read("server_info");
      this.#on.info(this.#info);
    }
    this.#on.loads(loads);
    if (performance.now() - this.#historyMs < HISTORY_MS) return;
    this.#historyMs = performance.now();
    this.#on.history(await this.#readHistory());
  }

  async #readHistory() {
    try {
      return await this.#server.read("loads/history");
    } catch (error) {
      // Only admins may see what other tenants do.
      if (error.status === 403) return null;
      throw error;
    }
  }
}
