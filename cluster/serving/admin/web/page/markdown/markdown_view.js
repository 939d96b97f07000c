// The nodes of a Markdown text that grows. Blocks that no further text can change are kept.

import { make } from "../dom.js";
import { blockNodes } from "./blocks.js";
import { Budget } from "./budget.js";
import { CodeBlock, completeCode } from "./code_block.js";
import { lexer } from "./lexer.js";
import { ListBlock } from "./list_block.js";
import { TableBlock } from "./table_block.js";

const PAUSE_MS = 40;
// Drawing takes at most one part in this many of the time.
const SHARE = 5;
const NUM_OPEN_BLOCKS = 2;
// Blocks that are extended where they grow.
const GROWING = { code: CodeBlock, list: ListBlock, table: TableBlock };

export class MarkdownView {
  #text = "";
  #blocks = [];
  /** The number of characters whose blocks are final, and the number of these blocks. */
  #numFinalChars = 0;
  #numFinalBlocks = 0;
  #isEnded = false;
  #isDrawing = false;
  #plain = null;
  #onDraw;

  /** Every change of the nodes is made inside of `onDraw`. */
  constructor(onDraw = (draw) => draw()) {
    this.#onDraw = onDraw;
    this.node = make("div", { className: "markdown" });
  }

  get text() {
    return this.#text;
  }

  append(text) {
    // The halves of a line break may come one after the other.
    if (text.startsWith("\n") && this.#text.endsWith("\r")) this.#text = this.#text.slice(0, -1);
    this.#text += text.replaceAll("\r\n", "\n");
    this.#draw();
  }

  /** Draw the text a last time, as a whole; return when that is done. */
  async end() {
    this.#isEnded = true;
    await this.#draw();
  }

  async #draw() {
    if (this.#isDrawing) return this.#isDrawing;
    let finish;
    this.#isDrawing = new Promise((resolve) => {
      finish = resolve;
    });
    for (;;) {
      const isLast = this.#isEnded;
      const text = this.#text;
      const from = isLast ? 0 : this.#numFinalChars;
      const parsed = this.#plain ? null : await lexer.ask(text.slice(from));
      const startedMs = performance.now();
      this.#onDraw(() => {
        if (parsed === null) this.#showPlain(text);
        else this.#show(parsed, text, from);
      });
      if (isLast || (this.#text === text && !this.#isEnded)) break;
      if (!this.#isEnded) {
        const spentMs = performance.now() - startedMs;
        await new Promise((wake) => setTimeout(wake, Math.max(PAUSE_MS, SHARE * spentMs)));
      }
    }
    if (this.#isEnded) completeCode(this.node);
    this.#isDrawing = false;
    finish();
    return undefined;
  }

  #showPlain(text) {
    if (this.#plain === null) {
      this.#plain = document.createTextNode("");
      this.#blocks = [];
      this.node.replaceChildren(make("p", { className: "plain" }, this.#plain));
    }
    this.#plain.appendData(text.slice(this.#plain.length));
  }

  #show({ tokens, hasDefinitions }, text, from) {
    const first = from === 0 ? 0 : this.#numFinalBlocks;
    const visible = tokens.filter((token) => token.type !== "space" && token.type !== "def");
    visible.forEach((token, index) => this.#showBlock(first + index, token, hasDefinitions));
    for (const block of this.#blocks.splice(first + visible.length)) block.node.remove();
    this.#finalize(tokens, visible, text, from, first);
  }

  #showBlock(index, token, isStale) {
    const old = this.#blocks[index];
    // Definitions change links in blocks with the same source.
    if (old?.raw === token.raw && old.type === token.type && !isStale) return;
    const Block = GROWING[token.type];
    if (Block !== undefined) {
      if (!isStale && old?.growing instanceof Block && old.growing.extend(token)) {
        old.raw = token.raw;
        return;
      }
      const growing = new Block(token);
      this.#place(index, { raw: token.raw, type: token.type, node: growing.node, growing });
      return;
    }
    const [node] = blockNodes([token], new Budget());
    this.#place(index, { raw: token.raw, type: token.type, node });
  }

  #place(index, block) {
    const old = this.#blocks[index];
    if (old) old.node.replaceWith(block.node);
    else this.node.append(block.node);
    this.#blocks[index] = block;
  }

  /** Remember the blocks before the last ones as final. */
  #finalize(tokens, visible, text, from, first) {
    const numFinal = visible.length - NUM_OPEN_BLOCKS;
    if (numFinal <= 0) return;
    const next = tokens.indexOf(visible[numFinal]);
    const raw = tokens.slice(0, next).map((token) => token.raw).join("");
    // Otherwise the parser has rewritten the source.
    if (!text.startsWith(raw, from)) return;
    for (let index = this.#numFinalBlocks; index < first + numFinal; index += 1) {
      completeCode(this.#blocks[index].node);
    }
    this.#numFinalChars = from + raw.length;
    this.#numFinalBlocks = first + numFinal;
  }
}
