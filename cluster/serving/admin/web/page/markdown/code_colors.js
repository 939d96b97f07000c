// Colors what is in view of code, by highlights of the browser, which add no elements.

import { KINDS } from "./code_kinds.js";
import { TimedWorker } from "./timed_worker.js";

const LIMIT_MS = 5000;
const MAX_CHARS = 200_000;
// Parts so near to the view are colored, too.
const MARGIN = "300px";

class CodeColors {
  #worker = new TimedWorker("highlighter", LIMIT_MS);
  #highlights = [];
  #observer = null;
  /** The text nodes and runs of parts that are observed, and their ranges while in view. */
  #parts = new WeakMap();

  constructor() {
    // Older browsers show code in one color.
    if (globalThis.CSS?.highlights === undefined) return;
    this.#highlights = KINDS.map((kind) => {
      const highlight = new Highlight();
      CSS.highlights.set(`code-${kind}`, highlight);
      return highlight;
    });
    this.#observer = new IntersectionObserver((entries) => this.#note(entries), {
      rootMargin: MARGIN,
      // Of the block, which scrolls, too.
      scrollMargin: MARGIN,
    });
  }

  /** Color the parts of a text, which are elements with one text node each, in their order. */
  async color(text, language, parts) {
    if (this.#observer === null || language === "" || text.length > MAX_CHARS) return;
    const runs = await this.#worker.ask({ text, language: language.toLowerCase() });
    if (runs === null) return;
    let from = 0;
    let next = 0;
    for (const part of parts) {
      const end = from + part.firstChild.length;
      const own = [];
      while (next < runs.length && runs[next] < end) {
        own.push([Math.max(runs[next], from) - from, Math.min(runs[next + 1], end) - from, runs[next + 2]]);
        // One that goes on, such as a long comment, is also of the next part.
        if (runs[next + 1] > end) break;
        next += 3;
      }
      this.#parts.set(part, { runs: own, ranges: null });
      this.#observer.observe(part);
      from = end;
    }
  }

  #note(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.#show(target);
      else this.#hide(target);
    }
  }

  #show(part) {
    const found = this.#parts.get(part);
    if (found.ranges !== null) return;
    const node = part.firstChild;
    found.ranges = found.runs.map(([start, end, kind]) => {
      const range = new StaticRange({
        startContainer: node,
        startOffset: start,
        endContainer: node,
        endOffset: end,
      });
      this.#highlights[kind].add(range);
      return { range, kind };
    });
  }

  #hide(part) {
    const found = this.#parts.get(part);
    for (const { range, kind } of found.ranges ?? []) this.#highlights[kind].delete(range);
    found.ranges = null;
    if (!part.isConnected) this.#observer.unobserve(part);
  }
}

/** The colors of all code on the page. */
export const codeColors = new CodeColors();
