// The conversation on the page: sends it to the model and shows what comes back.

import { byId } from "../dom.js";
import { Answer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { AnswerView, UserView } from "./message_view.js";

export class Chat {
  #server;
  #settings;
  #history;
  #scroll;
  #model;
  #onChange;
  #onUnanswered;
  #conversation = new Conversation();
  /** The views of the messages; those of tools have none. */
  #views = [];
  #running = null;

  /**
   * `model` returns the name of the model; `onChange` is called after each change of state, and
   * `onUnanswered` with the text of a message that has got no answer.
   */
  constructor({ server, settings, history, scroll, model, onChange, onUnanswered }) {
    this.#server = server;
    this.#settings = settings;
    this.#history = history;
    this.#scroll = scroll;
    this.#model = model;
    this.#onChange = onChange;
    this.#onUnanswered = onUnanswered;
  }

  get isRunning() {
    return this.#running !== null;
  }

  get isEmpty() {
    return this.#conversation.isEmpty;
  }

  get id() {
    return this.#conversation.id;
  }

  /** Show a conversation of the history, or an empty one. */
  open(chat = null) {
    this.stop();
    this.#running = null;
    this.#conversation = chat === null ? new Conversation() : new Conversation(chat.id, chat.messages);
    this.#views = [];
    byId("messages").replaceChildren();
    for (const message of this.#conversation.messages) this.#showMessage(message);
    this.#askForResults();
    this.#scroll.toEnd();
    this.#onChange();
  }

  stop() {
    this.#running?.abort();
  }

  /** Send what the user has written. */
  async send(text) {
    const { messages } = this.#conversation;
    // A message that got no answer is replaced.
    if (messages.at(-1)?.role === "user") this.#truncate(messages.length - 1);
    this.#add({ role: "user", content: text });
    await this.#answer();
  }

  #add(message) {
    this.#conversation.add(message);
    this.#showMessage(message);
  }

  /** Show a message of the conversation below the others. */
  #showMessage(message) {
    const index = this.#views.length;
    let view = null;
    if (message.role === "user") {
      view = new UserView(message.content, (text) => this.#resend(index, text));
    } else if (message.role === "assistant") {
      view = new AnswerView((draw) => this.#scroll.keep(draw));
      if (message.reasoning) view.appendReasoning(message.reasoning);
      if (message.content) view.append(message.content);
      if (message.tool_calls) view.showCalls(message.tool_calls);
      view.end(message, () => this.#regenerate(index));
    } else {
      this.#views
        .flatMap((one) => one?.calls ?? [])
        .findLast((call) => call.id === message.tool_call_id)
        ?.showResult(message.content);
    }
    this.#views.push(view);
    if (view !== null) byId("messages").append(view.node);
  }

  /** Replace a message of the user, and all that follows it. */
  #resend(index, text) {
    if (this.isRunning) return;
    this.#truncate(index);
    this.send(text);
  }

  /** Replace an answer, and all that follows it. */
  #regenerate(index) {
    if (this.isRunning) return;
    this.#truncate(index);
    this.#answer();
  }

  #truncate(index) {
    this.#conversation.truncate(index);
    for (const view of this.#views.splice(index)) view?.node.remove();
    // An answer that failed has a view, but it is no message.
    byId("messages").querySelector(".failed")?.remove();
  }

  async #answer() {
    let request;
    try {
      request = this.#request();
    } catch (error) {
      this.#fail(new AnswerView((draw) => this.#scroll.keep(draw)), error.message);
      return;
    }
    const conversation = this.#conversation;
    const index = this.#views.length;
    const view = new AnswerView((draw) => this.#scroll.keep(draw));
    byId("messages").querySelector(".failed")?.remove();
    byId("messages").append(view.node);
    this.#scroll.toEnd();
    const running = new AbortController();
    this.#running = running;
    view.isRunning = true;
    this.#onChange();
    const answer = new Answer();
    let problem = null;
    try {
      await this.#receive(request, answer, view, running.signal);
    } catch (error) {
      if (!running.signal.aborted) problem = error.message;
    }
    answer.end(running.signal.aborted);
    view.isRunning = view.isReconnecting = false;
    // The user may have opened another conversation.
    const isShown = conversation === this.#conversation;
    if (this.#running === running) this.#running = null;
    if (answer.isEmpty && !answer.isComplete) {
      if (isShown && problem === null) {
        view.node.remove();
        this.#returnText();
      }
      if (isShown && problem !== null) this.#fail(view, problem);
    } else {
      const message = answer.message();
      conversation.add(message);
      this.#history.save(conversation);
      if (isShown) {
        this.#views.push(view);
        await view.end(message, () => this.#regenerate(index));
        if (problem !== null) view.showProblem(problem, () => this.#regenerate(index));
        // While the answer was drawn, too, the user may have opened another conversation.
        else if (answer.isComplete && conversation === this.#conversation) this.#askForResults();
      }
    }
    announce(problem === null ? "Response complete." : `Request failed: ${problem}`);
    this.#onChange();
  }

  #request() {
    return {
      ...this.#settings.parameters(),
      model: this.#model() || undefined,
      messages: this.#conversation.forRequest(this.#settings.system),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  async #receive(request, answer, view, signal) {
    for await (const chunk of this.#server.complete(request, signal)) {
      view.isReconnecting = chunk === null;
      if (chunk === null) continue;
      const { content, reasoning, hasCalls } = answer.add(chunk);
      if (reasoning) view.appendReasoning(reasoning);
      if (content) view.append(content);
      if (hasCalls) view.showCalls(answer.toolCalls);
    }
    if (!answer.isComplete) {
      throw new Error("The connection closed before the response was complete.");
    }
  }

  /** Show why there is no answer. */
  #fail(view, problem) {
    view.node.classList.add("failed");
    byId("messages").querySelector(".failed")?.remove();
    byId("messages").append(view.node);
    view.showProblem(problem, () => {
      if (!this.isRunning) this.#answer();
    });
    this.#returnText();
  }

  /** Return the last message of the user, which the next one replaces. */
  #returnText() {
    const last = this.#conversation.messages.at(-1);
    if (last?.role === "user") this.#onUnanswered(last.content);
  }

  #askForResults() {
    const open = this.#conversation.openCalls;
    const view = this.#views.findLast((one) => one instanceof AnswerView);
    if (open.length === 0 || view === undefined) return;
    view.askForResults((results) => {
      for (const { id, text } of results) {
        this.#add({ role: "tool", tool_call_id: id, content: text });
      }
      this.#answer();
    });
  }
}

function announce(text) {
  byId("announcement").textContent = text;
}
