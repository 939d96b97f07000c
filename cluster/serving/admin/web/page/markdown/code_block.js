// A code block with its language and a button that copies it.

import { make } from "../dom.js";
import { copyButton } from "../copy_button.js";

export class CodeBlock {
  #text;
  #language;

  constructor(token) {
    const language = languageOf(token);
    this.#language = language;
    this.#text = document.createTextNode(token.text);
    const code = make("code", {}, this.#text);
    this.node = make(
      "figure",
      { className: "code" },
      make(
        "figcaption",
        {},
        make("span", { textContent: language }),
        copyButton(() => this.#text.data),
      ),
      make("pre", { tabIndex: 0 }, code),
    );
  }

  /** Extend the block to a longer text, if it begins alike; return whether it does. */
  extend(token) {
    const { text } = token;
    if (languageOf(token) !== this.#language || !text.startsWith(this.#text.data)) return false;
    this.#text.appendData(text.slice(this.#text.length));
    return true;
  }
}

/** Return the language of a code block, such as "python". */
function languageOf(token) {
  return (token.lang ?? "").trim().split(/\s/)[0].slice(0, 30);
}
