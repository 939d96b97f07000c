// The children of a node that grows at its end.

import { Budget } from "./budget.js";

export class GrowingParts {
  #parent;
  /** The source of each child, its node, and the budget that is left behind it. */
  #parts = [];

  constructor(parent) {
    this.#parent = parent;
  }

  /**
   * Show a child for each source. Those before the first source that changed are kept, others are
   * made with `makeNode`, which gets an index and the budget of all children.
   */
  show(sources, makeNode) {
    const changed = sources.findIndex((source, index) => this.#parts[index]?.source !== source);
    const numKept = changed === -1 ? sources.length : changed;
    for (const { node } of this.#parts.splice(numKept)) node.remove();
    const budget = new Budget(this.#parts.at(-1)?.numLeft);
    const added = sources.slice(numKept).map((source, offset) => {
      const node = makeNode(numKept + offset, budget);
      return { source, node, numLeft: budget.numLeft };
    });
    this.#parts.push(...added);
    this.#parent.append(...added.map(({ node }) => node));
  }
}
