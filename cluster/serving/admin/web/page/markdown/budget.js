// Limits of what a text may make of a page.

/** Blocks and spans that are nested deeper are shown as text. */
export const MAX_DEPTH = 12;

/** Tables with more cells are shown as text. */
export const MAX_CELLS = 2000;

const MAX_NODES = 3000;

/** The number of nodes that a block may still make; what exceeds it is shown as text. */
export class Budget {
  #numLeft = MAX_NODES;

  /** Return whether one more node may be made. */
  take() {
    this.#numLeft -= 1;
    return this.#numLeft >= 0;
  }
}
