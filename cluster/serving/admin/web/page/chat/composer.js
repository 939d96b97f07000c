// The field in which the user writes, with its buttons.

import { byId } from "../dom.js";

export class Composer {
  #field = byId("text");
  #chat;

  constructor(chat) {
    this.#chat = chat;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#field.addEventListener("input", () => this.#fit());
    this.#field.addEventListener("keydown", (event) => {
      // Enter also confirms the composition of an input method.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", (event) => {
      // In a dialog, Escape closes it.
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
    });
    byId("stop").addEventListener("click", () => {
      chat.stop();
      this.focus();
    });
  }

  focus() {
    this.#field.focus();
  }

  /** Show the state of the chat; `reason` says why nothing can be sent, if so. */
  show(reason = "") {
    byId("send").hidden = this.#chat.isRunning;
    byId("stop").hidden = !this.#chat.isRunning;
    this.#field.disabled = byId("send").disabled = reason !== "";
    this.#field.placeholder = reason || "Send a message";
  }

  #send() {
    const text = this.#field.value.trim();
    if (!text || this.#chat.isRunning) return;
    this.#field.value = "";
    this.#fit();
    this.#chat.send(text);
  }

  #fit() {
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight + 2}px`;
  }
}
