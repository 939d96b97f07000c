// The list of earlier conversations.

import { byId, make, makeButton } from "../dom.js";
import { formatDate } from "../format.js";

const TITLE_LENGTH = 80;

export class HistoryView {
  #history;
  #onOpen;

  /** `onOpen` is called with the conversation that the user chooses. */
  constructor(history, onOpen) {
    this.#history = history;
    this.#onOpen = onOpen;
    byId("forget").addEventListener("click", () => {
      if (!confirm("Delete all conversations from this browser?")) return;
      history.clear();
      this.show();
    });
  }

  /** Show the list; `currentId` is the conversation on the page. */
  show(currentId) {
    const chats = this.#history.chats;
    byId("chats").replaceChildren(...chats.map((chat) => this.#row(chat, currentId)));
    byId("no-chats").hidden = chats.length > 0;
    byId("forget").hidden = chats.length === 0;
  }

  #row(chat, currentId) {
    const title = String(chat.messages[0]?.content ?? "").slice(0, TITLE_LENGTH);
    const open = makeButton("", "open", () => this.#onOpen(chat));
    open.append(make("span", { className: "title", textContent: title }));
    if (chat.savedMs) open.append(make("small", { textContent: formatDate(chat.savedMs) }));
    if (chat.id === currentId) open.setAttribute("aria-current", "true");
    const remove = makeButton("\u00d7", "remove", () => {
      this.#history.remove(chat.id);
      this.show(currentId);
    });
    remove.setAttribute("aria-label", `Delete: ${title}`);
    return make("li", {}, open, remove);
  }
}
