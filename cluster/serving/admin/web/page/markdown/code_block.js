// A code block with its language and a button that copies it. It has colors once it is complete.

import { make } from "../dom.js";
import { copyButton } from "../copy_button.js";
import { codeColors } from "./code_colors.js";

// Lines of a part: a browser lays out a part that grows, and not those before it.
const PART_LINES = 32;
// The last one has all further lines.
const MAX_PARTS = 500;

const COMPLETE = "complete";

/** Tell all code blocks in a node that they are complete. */
export function completeCode(node) {
  const found = node.matches("figure.code") ? [node] : node.querySelectorAll("figure.code");
  for (const one of found) one.dispatchEvent(new Event(COMPLETE));
}

export class CodeBlock {
  #text = "";
  #language;
  #code = make("code");
  #numParts = 0;
  /** The text node of the last part, and the number of its whole lines. */
  #last = null;
  #numLines = PART_LINES;

  constructor(token) {
    this.#language = languageOf(token);
    this.node = make(
      "figure",
      { className: "code" },
      make(
        "figcaption",
        {},
        make("span", { textContent: this.#language }),
        copyButton(() => this.#text),
      ),
      make("pre", { tabIndex: 0 }, this.#code),
    );
    this.#append(token.text);
    const color = () => codeColors.color(this.#text, this.#language, this.#code.children);
    this.node.addEventListener(COMPLETE, color, { once: true });
  }

  /** Extend the block to a longer text, if it begins alike; return whether it does. */
  extend(token) {
    const { text } = token;
    if (languageOf(token) !== this.#language || !text.startsWith(this.#text)) return false;
    this.#append(text.slice(this.#text.length));
    return true;
  }

  #append(text) {
    this.#text += text;
    const parts = [];
    let from = 0;
    while (from < text.length) {
      if (this.#numLines === PART_LINES && this.#numParts < MAX_PARTS) {
        this.#last = document.createTextNode("");
        this.#numLines = 0;
        this.#numParts += 1;
        parts.push(make("span", { className: "lines" }, this.#last));
      }
      const end = this.#endOfPart(text, from);
      this.#last.appendData(text.slice(from, end));
      from = end;
    }
    this.#code.append(...parts);
  }

  /** Return where the part ends that has the text from an index on, and count its lines. */
  #endOfPart(text, from) {
    if (this.#numLines === PART_LINES) return text.length;
    let end = from;
    while (this.#numLines < PART_LINES) {
      const found = text.indexOf("\n", end);
      if (found < 0) return text.length;
      end = found + 1;
      this.#numLines += 1;
    }
    return end;
  }
}

/** Return the language of a code block, such as "python". */
function languageOf(token) {
  return (token.lang ?? "").trim().split(/\s/)[0].slice(0, 30);
}
