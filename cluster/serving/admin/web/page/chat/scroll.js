// Keeps the end of the conversation in view while it grows, unless the user has scrolled up.

import { byId } from "../dom.js";

const MARGIN = 48;

export class Scroll {
  #node = byId("scroll");
  #button = byId("to-end");
  #isPinned = true;
  #lastTop = 0;

  constructor() {
    this.#node.addEventListener("scroll", () => this.#note(), { passive: true });
    this.#button.addEventListener("click", () => this.toEnd());
    // Messages get their real size only when they come into view.
    new ResizeObserver(() => this.#follow()).observe(byId("messages"));
  }

  /** Apply a change of the conversation. */
  keep(change) {
    change();
    this.#follow();
  }

  toEnd() {
    this.#isPinned = true;
    this.#follow();
  }

  #follow() {
    if (this.#isPinned) this.#node.scrollTop = this.#node.scrollHeight;
    this.#button.hidden = this.#isPinned || this.#isAtEnd;
  }

  get #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#node;
    return scrollHeight - scrollTop - clientHeight < MARGIN;
  }

  #note() {
    const { scrollTop } = this.#node;
    // Only the user scrolls up.
    if (scrollTop < this.#lastTop - 1 && !this.#isAtEnd) this.#isPinned = false;
    if (this.#isAtEnd) this.#isPinned = true;
    this.#lastTop = scrollTop;
    this.#button.hidden = this.#isPinned;
  }
}
