// A message on the page.

import { copyButton } from "../copy_button.js";
import { make, makeButton } from "../dom.js";
import { MarkdownView } from "../markdown/markdown_view.js";
import { ReasoningView } from "./reasoning_view.js";
import { timingText } from "./timing.js";
import { ToolCallView } from "./tool_call_view.js";

/** What the user has written. */
export class UserView {
  #text;
  #bubble;
  #onEdit;

  /** `onEdit` is called with another text that the user writes. */
  constructor(text, onEdit) {
    this.#text = text;
    this.#onEdit = onEdit;
    this.#bubble = make("p", { className: "bubble plain", textContent: text });
    this.node = make("li", { className: "message user" }, speaker("You: "), this.#bubble);
    this.node.append(
      actions(copyButton(() => text), makeButton("Edit", "quiet edit", () => this.#edit())),
    );
  }

  #edit() {
    const field = make("textarea", { className: "bubble", value: this.#text, "aria-label": "Message" });
    field.rows = Math.min(12, this.#text.split("\n").length + 1);
    const close = () => form.replaceWith(this.#bubble);
    const form = make(
      "form",
      { className: "edit-form" },
      field,
      actions(
        makeButton("Cancel", "quiet", close),
        make("button", { className: "quiet strong", textContent: "Send" }),
      ),
    );
    const send = () => {
      if (field.value.trim()) this.#onEdit(field.value.trim());
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    this.#bubble.replaceWith(form);
    field.focus();
  }
}

/** What the model answers. */
export class AnswerView {
  #reasoning = null;
  #markdown;
  #calls = [];
  #onDraw;

  /** Every change of the nodes is made inside of `onDraw`. */
  constructor(onDraw) {
    this.#onDraw = onDraw;
    this.#markdown = new MarkdownView(onDraw);
    this.node = make("li", { className: "message assistant" }, speaker("Model: "));
    this.node.append(this.#markdown.node);
  }

  set isRunning(isRunning) {
    this.node.classList.toggle("running", isRunning);
  }

  set isReconnecting(isReconnecting) {
    this.node.classList.toggle("reconnecting", isReconnecting);
  }

  get calls() {
    return this.#calls;
  }

  appendReasoning(text) {
    this.#onDraw(() => {
      if (this.#reasoning === null) {
        this.#reasoning = new ReasoningView();
        this.#markdown.node.before(this.#reasoning.node);
      }
      this.#reasoning.append(text);
    });
  }

  append(text) {
    this.#markdown.append(text);
  }

  /** Show the calls of tools as far as they are known. */
  showCalls(calls) {
    this.#onDraw(() => {
      calls.forEach((call, index) => {
        if (index < this.#calls.length) {
          this.#calls[index].draw();
          return;
        }
        this.#calls.push(new ToolCallView(call));
        this.node.append(this.#calls[index].node);
      });
    });
  }

  /** Show a complete message, and buttons for it. */
  async end({ content, reasoning, timing }, onRegenerate) {
    await this.#markdown.end();
    this.#onDraw(() => {
      this.#calls.forEach((call) => call.finish());
      if (reasoning && timing?.reasoningSeconds) this.#reasoning.setTime(timing.reasoningSeconds);
      const row = actions(makeButton("Regenerate", "quiet regenerate", onRegenerate));
      if (content) row.prepend(copyButton(() => content));
      if (timing) row.append(make("span", { className: "timing", textContent: timingText(timing) }));
      this.node.append(row);
    });
  }

  /** Show why the answer failed, and a button that asks again. */
  showProblem(text, onRetry) {
    this.#onDraw(() => {
      const problem = make("div", { className: "problem" }, make("p", { textContent: text }));
      problem.append(makeButton("Retry", "quiet retry", onRetry));
      this.node.append(problem);
    });
  }

  /** Ask for the results of the calls; `onResults` is called once the user has sent them. */
  askForResults(onResults) {
    this.#calls.forEach((call) => call.askForResult());
    const send = makeButton("Send results", "send-results", () => {
      send.remove();
      onResults(this.#calls.map((call) => ({ id: call.id, text: call.result })));
    });
    this.#onDraw(() => this.#calls.at(-1).node.after(send));
  }
}

function speaker(text) {
  return make("span", { className: "visually-hidden", textContent: text });
}

function actions(...buttons) {
  return make("div", { className: "actions" }, ...buttons);
}
