// A panel beside the chat that a button shows and hides; on narrow screens it covers the chat.

import { byId } from "./dom.js";

export class Drawer {
  #panel;
  #button;
  #narrow;

  /** It is open at first on screens that are wide enough. */
  constructor(panelId, buttonId, minWidth) {
    this.#panel = byId(panelId);
    this.#button = byId(buttonId);
    this.#narrow = matchMedia(`(max-width: ${minWidth})`);
    this.#button.addEventListener("click", () => this.#set(this.#panel.hidden));
    this.#narrow.addEventListener("change", () => this.#set(!this.#narrow.matches));
    this.#set(!this.#narrow.matches);
  }

  /** Close it where it covers the chat. */
  closeIfNarrow() {
    if (this.#narrow.matches) this.#set(false);
  }

  #set(isOpen) {
    this.#panel.hidden = !isOpen;
    this.#button.setAttribute("aria-expanded", String(isOpen));
  }
}
