// A table that grows at its end: rows whose source is the same are kept.

import { make } from "../dom.js";
import { tableNode, tableRow } from "./blocks.js";
import { Budget } from "./budget.js";
import { GrowingParts } from "./growing_parts.js";

export class TableBlock {
  #head;
  #parts;

  constructor(token) {
    this.#head = headOf(token);
    const body = make("tbody");
    this.node = tableNode(token, body, new Budget());
    this.#parts = new GrowingParts(body);
    this.extend(token);
  }

  /** Show the rows of a table that grew; return whether it is the same table. */
  extend(token) {
    if (headOf(token) !== this.#head) return false;
    const sources = token.rows.map((cells) => cells.map((cell) => cell.text).join("\n"));
    this.#parts.show(sources, (index, budget) => tableRow(token.rows[index], "td", budget));
    return true;
  }
}

/** Return what all rows depend on. */
function headOf(token) {
  return JSON.stringify([token.align, token.header.map((cell) => cell.text)]);
}
