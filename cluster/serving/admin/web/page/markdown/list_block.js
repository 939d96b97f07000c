// A list that grows at its end: items whose source is the same are kept.

import { make } from "../dom.js";
import { listItem, listNode, plainBlock } from "./blocks.js";
import { GrowingParts } from "./growing_parts.js";

export class ListBlock {
  #ordered;
  #start;
  #parts;

  constructor(token) {
    this.#ordered = token.ordered;
    this.#start = token.start;
    this.node = listNode(token);
    this.#parts = new GrowingParts(this.node);
    this.extend(token);
  }

  /** Show the items of a list that grew; return whether it is the same list. */
  extend(token) {
    if (token.ordered !== this.#ordered || token.start !== this.#start) return false;
    const { items, plain } = token;
    const sources = items.map((item) => (item.loose ? `\n${item.raw}` : item.raw));
    this.#parts.show([...sources, ...plain], (index, budget) => {
      const item = items[index];
      if (item !== undefined && budget.take()) return listItem(item, budget, 1);
      return make("li", {}, plainBlock(item?.raw ?? plain[index - items.length]));
    });
    return true;
  }
}
