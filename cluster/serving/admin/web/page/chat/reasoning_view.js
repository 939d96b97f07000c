// What a model reasons before its answer, folded.

import { make } from "../dom.js";
import { formatSeconds } from "../format.js";

export class ReasoningView {
  #text = document.createTextNode("");
  #title = make("summary", { textContent: "Reasoning" });

  constructor() {
    this.node = make(
      "details",
      { className: "reasoning" },
      this.#title,
      make("p", { className: "plain" }, this.#text),
    );
  }

  get text() {
    return this.#text.data;
  }

  append(text) {
    this.#text.appendData(text);
  }

  /** Say how long it took, once the answer begins. */
  setTime(seconds) {
    this.#title.textContent = `Reasoned for ${formatSeconds(seconds)}`;
  }
}
