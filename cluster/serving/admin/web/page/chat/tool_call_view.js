// A call of a tool: its arguments, and its result, which the user enters.

import { make } from "../dom.js";
import { CodeBlock } from "../markdown/code_block.js";

export class ToolCallView {
  #call;
  #code = new CodeBlock({ text: "", lang: "json" });
  #name = make("strong");
  #result = null;

  constructor(call) {
    this.#call = call;
    this.node = make(
      "section",
      { className: "tool", "aria-label": "Tool call" },
      make("h3", {}, "Calls ", this.#name),
    );
    this.node.append(this.#code.node);
    this.draw();
  }

  get id() {
    return this.#call.id;
  }

  /** The result in its field. */
  get result() {
    return this.#result?.value ?? "";
  }

  /** Show the call as it is. */
  draw() {
    const { name, arguments: text } = this.#call.function;
    this.#name.textContent = name;
    if (!this.#code.extend({ text: text, lang: "json" })) {
      const code = new CodeBlock({ text, lang: "json" });
      this.#code.node.replaceWith(code.node);
      this.#code = code;
    }
  }

  /** Indent the arguments, once they are complete. */
  finish() {
    let text = this.#call.function.arguments;
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // They are shown as the model wrote them.
    }
    const code = new CodeBlock({ text, lang: "json" });
    this.#code.node.replaceWith(code.node);
    this.#code = code;
  }

  /** Add a field for the result. */
  askForResult() {
    this.#result = make("textarea", { rows: 2, placeholder: "What the tool returns" });
    this.node.append(make("label", { className: "result" }, "Result", this.#result));
  }

  /** Show the result that was sent. */
  showResult(text) {
    this.#result = null;
    this.node.querySelector(".result")?.remove();
    this.node.append(
      make(
        "details",
        { className: "result" },
        make("summary", { textContent: "Result" }),
        make("p", { className: "plain", textContent: text }),
      ),
    );
  }
}
