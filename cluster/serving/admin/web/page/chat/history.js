// Conversations in this browser's storage, the latest first. Keys are never among them.

const STORAGE_KEY = "pagedray.chats";
const MAX_CHATS = 50;
const MAX_LENGTH = 1_000_000;

export class History {
  get chats() {
    try {
      const chats = JSON.parse(localStorage.getItem(STORAGE_KEY));
      return Array.isArray(chats) ? chats.filter(isChat) : [];
    } catch {
      // The browser allows no storage, or something else is stored there.
      return [];
    }
  }

  /** Keep a conversation, and forget the oldest ones beyond the limits. */
  save({ id, messages }) {
    const others = this.chats.filter((chat) => chat.id !== id).slice(0, MAX_CHATS - 1);
    const chat = { id, savedMs: Date.now(), messages };
    let numLeft = MAX_LENGTH - JSON.stringify(chat).length;
    // One that is too long for the storage does not push out the others.
    const chats = numLeft < 0 ? [] : [chat];
    if (numLeft < 0) numLeft = MAX_LENGTH;
    for (const other of others) {
      numLeft -= JSON.stringify(other).length;
      if (numLeft < 0) break;
      chats.push(other);
    }
    this.#store(chats);
  }

  remove(id) {
    this.#store(this.chats.filter((chat) => chat.id !== id));
  }

  clear() {
    this.#store([]);
  }

  #store(chats) {
    try {
      localStorage.setItem(STORAGE_KEY, JSON.stringify(chats));
    } catch {
      // The conversation stays on the page.
    }
  }
}

function isChat(chat) {
  return (
    Array.isArray(chat?.messages) &&
    chat.messages.every((message) => ["user", "assistant", "tool"].includes(message?.role))
  );
}
