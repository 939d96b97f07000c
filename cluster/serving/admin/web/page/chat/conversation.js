// A conversation: messages as the API has them, with what this page knows about answers.

const OWN_FIELDS = ["timing"];

export class Conversation {
  /** `messages` are those of a conversation that is continued. */
  constructor(id = newId(), messages = []) {
    this.id = id;
    this.messages = messages;
  }

  get isEmpty() {
    return this.messages.length === 0;
  }

  /** The calls of tools that have no result. */
  get openCalls() {
    const answered = new Set(this.messages.map((message) => message.tool_call_id));
    return (this.#lastOf("assistant")?.tool_calls ?? []).filter((call) => !answered.has(call.id));
  }

  add(message) {
    this.messages.push(message);
  }

  /** Remove a message and all after it. */
  truncate(index) {
    this.messages.length = index;
  }

  /** Return the messages for a request. */
  forRequest(system) {
    const messages = this.messages.map((message) =>
      Object.fromEntries(Object.entries(message).filter(([name]) => !OWN_FIELDS.includes(name))),
    );
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  #lastOf(role) {
    return this.messages.findLast((message) => message.role === role);
  }
}

function newId() {
  return `${Date.now()}-${Math.random()}`;
}
