// An answer that is being received: it collects the chunks of a stream and their times.

export class Answer {
  content = "";
  reasoning = "";
  toolCalls = [];
  #startedMs = performance.now();
  #firstMs = 0;
  #contentMs = 0;
  #endedMs = 0;
  #usage = null;
  #reason = null;
  #isStopped = false;

  get isEmpty() {
    return !this.content && !this.reasoning && this.toolCalls.length === 0;
  }

  /** Whether the server has said why the answer ended. */
  get isComplete() {
    return this.#reason !== null;
  }

  /** The seconds from the first token to the first that is no reasoning. */
  get reasoningSeconds() {
    return (this.#contentMs - this.#firstMs) / 1000;
  }

  /** Add a chunk; return its texts and whether calls of tools have changed. */
  add(chunk) {
    this.#usage = chunk.usage ?? this.#usage;
    const change = { content: "", reasoning: "", hasCalls: false };
    for (const { delta, finish_reason: reason } of chunk.choices ?? []) {
      this.#reason = reason ?? this.#reason;
      const content = delta?.content ?? "";
      const reasoning = delta?.reasoning ?? "";
      const calls = delta?.tool_calls ?? [];
      if (content || reasoning || calls.length) this.#firstMs ||= performance.now();
      if (content || calls.length) this.#contentMs ||= performance.now();
      this.content += content;
      this.reasoning += reasoning;
      calls.forEach((call) => this.#addCall(call));
      change.content += content;
      change.reasoning += reasoning;
      change.hasCalls ||= calls.length > 0;
    }
    return change;
  }

  /** Note the time; `isStopped` says whether the user has ended the answer. */
  end(isStopped) {
    this.#endedMs = performance.now();
    this.#isStopped = isStopped;
  }

  /** Return the answer as a message of the conversation. */
  message() {
    const message = { role: "assistant", content: this.content, timing: this.#timing() };
    if (this.reasoning) message.reasoning = this.reasoning;
    if (this.toolCalls.length) message.tool_calls = this.toolCalls;
    return message;
  }

  #addCall({ index = 0, id, function: part }) {
    const call = (this.toolCalls[index] ??= {
      id: "",
      type: "function",
      function: { name: "", arguments: "" },
    });
    call.id ||= id ?? "";
    call.function.name += part?.name ?? "";
    call.function.arguments += part?.arguments ?? "";
  }

  #timing() {
    const seconds = (fromMs, toMs) => Math.round(toMs - fromMs) / 1000;
    return {
      tokens: this.#usage?.completion_tokens ?? null,
      promptTokens: this.#usage?.prompt_tokens ?? null,
      seconds: seconds(this.#startedMs, this.#endedMs),
      firstSeconds: this.#firstMs ? seconds(this.#startedMs, this.#firstMs) : null,
      reasoningSeconds: this.reasoning && this.#contentMs ? this.reasoningSeconds : null,
      reason: this.#reason ?? (this.#isStopped ? null : "interrupted"),
    };
  }
}
