// Asks for the API key, which stays in the memory of this page.

import { byId } from "./dom.js";

export class KeyDialog {
  #dialog = byId("key-dialog");
  #server;
  #wasShown = false;

  /** `onKey` is called once the user has entered a key. */
  constructor(server, onKey) {
    this.#server = server;
    byId("status").addEventListener("click", () => {
      if (byId("status").dataset.state === "locked") this.open();
    });
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      server.key = byId("key").value;
      byId("key").value = "";
      this.#dialog.close();
      this.#wasShown = false;
      onKey();
    });
    byId("key-cancel").addEventListener("click", () => this.#dialog.close());
  }

  /** Ask for a key, unless the user has closed the dialog without one. */
  ask() {
    if (!this.#wasShown) this.open();
  }

  open() {
    if (this.#dialog.open) return;
    this.#wasShown = true;
    byId("key-problem").hidden = !this.#server.hasKey;
    this.#dialog.showModal();
    byId("key").focus();
  }
}
