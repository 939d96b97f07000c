// The field in which the user writes, with its buttons.

import { byId } from "../dom.js";

export class Composer {
  #field = byId("text");
  #returned = "";
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
    // It is being sent again.
    if (this.#chat.isRunning && this.#field.value === this.#returned) this.#clear();
    byId("send").hidden = this.#chat.isRunning;
    byId("stop").hidden = !this.#chat.isRunning;
    this.#field.disabled = byId("send").disabled = reason !== "";
    this.#field.placeholder = reason || "Send a message";
  }

  /** Put a message without an answer back into the field, before what the user has written since. */
  putBack(text) {
    this.#returned = text;
    this.#field.value = [text, this.#field.value].filter(Boolean).join("\n");
    this.#fit();
  }

  #send() {
    const text = this.#field.value.trim();
    if (!text || this.#chat.isRunning) return;
    this.#clear();
    this.#chat.send(text);
  }

  #clear() {
    this.#field.value = this.#returned = "";
    this.#fit();
  }

  #fit() {
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight + 2}px`;
  }
}
