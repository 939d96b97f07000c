// Limits of what a text may make of a page.

/** Blocks and spans that are nested deeper are shown as text. */
export const MAX_DEPTH = 12;

/** Further items of a list are shown as text. */
export const MAX_ITEMS = 1000;

const MAX_CELLS = 2000;

const MAX_NODES = 3000;

/** Return whether a table has so many cells that it is shown as text. */
export function isLargeTable({ rows, header }) {
  return (rows.length + 1) * header.length > MAX_CELLS;
}

/** The number of nodes that a block may still make; what exceeds it is shown as text. */
export class Budget {
  #numLeft;

  constructor(numLeft = MAX_NODES) {
    this.#numLeft = numLeft;
  }

  get numLeft() {
    return this.#numLeft;
  }

  /** Return whether one more node may be made. */
  take() {
    this.#numLeft -= 1;
    return this.#numLeft >= 0;
  }
}
