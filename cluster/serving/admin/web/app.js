// The web page of a PagedRay server: live statistics, and a chat with its model.
// Output of the model and of clients is inserted as text, never as HTML.
"use strict";

const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const NUM_POINTS = 120;
const MAX_CALLS = 20;
const CHATS_KEY = "pagedray.chats";
const MAX_CHATS = 20;
const MAX_STORED_LENGTH = 500_000;
const $ = (id) => document.getElementById(id);

/** Return the headers of a request; the API key is kept in its input field only. */
function headers(more = {}) {
  const key = $("key").value.trim();
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

/** Return the error message of a failed response. */
async function errorMessageOf(response) {
  try {
    const body = await response.json();
    if (typeof body.error?.message === "string") return body.error.message;
  } catch {
    // The body is not JSON.
  }
  return `The server returned status ${response.status}.`;
}

// ---- Statistics ----

class Stats {
  #last = null;
  #rates = [];
  #model = "";
  #timer = 0;

  start() {
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.refresh();
    });
    this.refresh();
  }

  async refresh() {
    clearTimeout(this.#timer);
    try {
      await this.#read();
    } catch {
      this.#setStatus("down", "Unreachable");
    }
    clearTimeout(this.#timer);
    if (!document.hidden) this.#timer = setTimeout(() => this.refresh(), POLL_MS);
  }

  async #read() {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const response = await fetch("loads", { headers: headers(), signal, cache: "no-store" });
    if (response.status === 401 || response.status === 403) {
      this.#setStatus("down", "API key required");
      return;
    }
    if (!response.ok) {
      this.#setStatus("down", "Not ready");
      return;
    }
    const loads = await response.json();
    if (!this.#model) await this.#readModel(signal);
    this.#setStatus(loads.is_ready ? "ready" : "down", loads.is_ready ? "Ready" : "Not ready");
    this.#render(loads);
  }

  async #readModel(signal) {
    const response = await fetch("v1/models", { headers: headers(), signal });
    if (!response.ok) return;
    this.#model = (await response.json()).data[0].id;
    $("model").textContent = this.#model;
    document.title = `${this.#model} - PagedRay`;
  }

  get model() {
    return this.#model;
  }

  #setStatus(state, text) {
    const status = $("status");
    status.dataset.state = state;
    if (status.textContent !== text) status.textContent = text;
  }

  #render(loads) {
    const before = this.#last;
    this.#last = loads;
    const passed = before ? loads.uptime_s - before.uptime_s : 0;
    const rate = (name) => (passed > 0 ? Math.max(0, loads[name] - before[name]) / passed : 0);
    const generated = rate("num_generated_tokens");
    this.#rates.push(generated);
    this.#rates = this.#rates.slice(-NUM_POINTS);
    drawSpark(this.#rates);
    $("rate").textContent = formatNumber(generated);
    $("prompt-rate").textContent = formatNumber(rate("num_prompt_tokens"));
    $("running").textContent = loads.num_running;
    $("waiting").textContent = loads.num_waiting;
    $("swapped").textContent = loads.num_swapped;
    const used = showPool("device", loads.num_blocks, loads.num_free_blocks, loads.num_cached_blocks);
    showPool("cpu", loads.num_cpu_blocks, loads.num_free_cpu_blocks, 0);
    $("step").textContent = formatSeconds(loads.last_step_s);
    $("hits").textContent = formatPercent(loads.num_hit_tokens, loads.num_queried_tokens);
    $("preemptions").textContent = loads.num_preemptions;
    $("uptime").textContent = formatSeconds(loads.uptime_s);
    $("summary").textContent = `${formatNumber(generated)} tokens/s, ${loads.num_running} running, ${used} of blocks used`;
    showCalls(loads.calls);
  }
}

function showPool(name, size, free, cached) {
  const used = size ? Math.round((100 * (size - free)) / size) : 0;
  $(`${name}-text`).textContent = size ? `${size - free} of ${size}` : "none";
  $(`${name}-meter`).setAttribute("aria-valuenow", used);
  $(`${name}-used`).style.width = `${size ? (100 * (size - free)) / size : 0}%`;
  if (name === "device") $("device-cached").style.width = `${size ? (100 * cached) / size : 0}%`;
  return `${used}%`;
}

function showCalls(calls) {
  const rows = calls.slice(0, MAX_CALLS).map((call) => {
    const row = document.createElement("tr");
    const texts = [call.id, formatSeconds(call.age_s), call.num_prompt_tokens, call.num_generated_tokens];
    for (const text of texts) row.insertCell().textContent = text;
    row.cells[0].title = call.id;
    return row;
  });
  $("calls-body").replaceChildren(...rows);
  $("calls").hidden = rows.length === 0;
  const others = calls.length - rows.length;
  $("no-calls").hidden = rows.length > 0 && others === 0;
  $("no-calls").textContent = others > 0 ? `${others} more not shown.` : "No active requests.";
}

function drawSpark(rates) {
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, index) => {
    const x = 240 - (240 * (rates.length - 1 - index)) / (NUM_POINTS - 1);
    return `${x.toFixed(1)} ${(46 - (44 * rate) / top).toFixed(1)}`;
  });
  const first = points[0].split(" ")[0];
  $("spark-line").setAttribute("d", `M${points.join("L")}`);
  $("spark-area").setAttribute("d", `M${first} 48L${points.join("L")}L240 48Z`);
}

function formatNumber(value) {
  return value < 10 && value > 0 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function formatPercent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)}%` : "-";
}

function formatSeconds(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

// ---- Text of a message ----

/** Return the nodes of a text with code blocks; its content stays text. */
function renderText(text) {
  const nodes = [];
  // Fences start a line; the last one may be open while the text is streamed.
  const parts = text.split(/^```[^\n]*\n?/m);
  parts.forEach((part, index) => {
    if (index % 2) {
      const pre = document.createElement("pre");
      const code = document.createElement("code");
      code.textContent = part.replace(/\n$/, "");
      pre.tabIndex = 0;
      pre.append(code, copyButton(code));
      nodes.push(pre);
      return;
    }
    const trimmed = part.replace(/^\n+|\n+$/g, "");
    if (trimmed || parts.length === 1) nodes.push(renderProse(trimmed));
  });
  return nodes;
}

/** Return a button that copies the text of a node. */
function copyButton(node) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy quiet";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(node.textContent);
      button.textContent = "Copied";
    } catch {
      // Browsers allow it on pages of this machine and over TLS only.
      button.textContent = "Not allowed";
    }
  });
  return button;
}

function renderProse(text) {
  const prose = document.createElement("p");
  prose.className = "text";
  for (const piece of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    const isCode = piece.length > 2 && piece.startsWith("`") && piece.endsWith("`");
    const isStrong = piece.length > 4 && piece.startsWith("**") && piece.endsWith("**");
    if (!isCode && !isStrong) {
      prose.append(piece);
      continue;
    }
    const node = document.createElement(isCode ? "code" : "strong");
    node.textContent = isCode ? piece.slice(1, -1) : piece.slice(2, -2);
    prose.append(node);
  }
  return prose;
}

/** A message in the conversation. */
class MessageView {
  #text = "";
  #reasoning = null;
  #body = document.createElement("div");
  #isDrawn = true;

  constructor(role) {
    this.node = document.createElement("li");
    this.node.className = `message ${role}`;
    const who = document.createElement("span");
    who.className = "visually-hidden";
    who.textContent = role === "user" ? "You: " : "Model: ";
    this.node.append(who, this.#body);
    $("messages").append(this.node);
    $("empty").hidden = true;
  }

  get text() {
    return this.#text;
  }

  get reasoning() {
    return this.#reasoning?.textContent ?? "";
  }

  /** Add what the model reasons before its answer, folded. */
  addReasoning(text) {
    if (this.#reasoning === null) {
      const details = document.createElement("details");
      details.className = "reasoning";
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      this.#reasoning = document.createElement("p");
      details.append(summary, this.#reasoning);
      this.#body.before(details);
    }
    keepScrolledToEnd(() => this.#reasoning.append(text));
  }

  add(text) {
    this.#text += text;
    if (!this.#isDrawn) return;
    this.#isDrawn = false;
    requestAnimationFrame(() => {
      this.#isDrawn = true;
      keepScrolledToEnd(() => this.#body.replaceChildren(...renderText(this.#text)));
    });
  }

  set isRunning(isRunning) {
    this.node.classList.toggle("running", isRunning);
  }

  note(text, kind = "note") {
    const note = document.createElement("p");
    note.className = kind;
    note.textContent = text;
    keepScrolledToEnd(() => this.node.append(note));
  }
}

/** Apply a change and keep the chat scrolled to its end, unless the user has scrolled up. */
function keepScrolledToEnd(change) {
  const scroll = $("scroll");
  const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
  change();
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
}

// ---- Chat ----

/** Yield the data of server-sent events. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

/** Conversations in the storage of this browser, the latest first; keys are never among them. */
class History {
  get chats() {
    try {
      const chats = JSON.parse(localStorage.getItem(CHATS_KEY)) ?? [];
      return Array.isArray(chats) ? chats : [];
    } catch {
      // The browser allows no storage, or something else is stored there.
      return [];
    }
  }

  save(id, messages) {
    const chats = this.chats.filter((chat) => chat.id !== id).slice(0, MAX_CHATS - 1);
    chats.unshift({ id, messages });
    while (chats.length && JSON.stringify(chats).length > MAX_STORED_LENGTH) chats.pop();
    this.#store(chats);
  }

  clear() {
    this.#store([]);
  }

  /** Show the list; `open` is called with the conversation that the user chooses. */
  show(open) {
    const chats = this.chats;
    const rows = chats.map((chat) => {
      const row = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.textContent = String(chat.messages?.[0]?.content ?? "").slice(0, 80);
      button.addEventListener("click", () => open(chat));
      row.append(button);
      return row;
    });
    $("chats").replaceChildren(...rows);
    $("no-chats").hidden = rows.length > 0;
    $("forget").hidden = rows.length === 0;
  }

  #store(chats) {
    try {
      localStorage.setItem(CHATS_KEY, JSON.stringify(chats));
    } catch {
      // The conversation stays on the page.
    }
  }
}

class Chat {
  #messages = [];
  #running = null;
  #stats;
  #history;
  #id = newId();
  #canRedo = false;

  constructor(stats, history) {
    this.#stats = stats;
    this.#history = history;
  }

  get isRunning() {
    return this.#running !== null;
  }

  clear() {
    this.stop();
    this.#id = newId();
    this.#canRedo = false;
    this.#messages = [];
    $("messages").replaceChildren();
    $("empty").hidden = false;
    this.#showState();
  }

  stop() {
    this.#running?.abort();
  }

  /** Continue a conversation of the history. */
  open(chat) {
    this.clear();
    this.#id = chat.id;
    this.#messages = chat.messages;
    this.#canRedo = true;
    for (const message of chat.messages) {
      const view = new MessageView(message.role);
      if (message.reasoning) view.addReasoning(message.reasoning);
      view.add(message.content);
    }
    this.#showState();
  }

  /** Take back the last message and its answer; return its text. */
  takeBack() {
    this.#messages.pop();
    const { content } = this.#messages.pop();
    this.#canRedo = false;
    $("messages").lastElementChild.remove();
    $("messages").lastElementChild.remove();
    $("empty").hidden = this.#messages.length > 0;
    this.#showState();
    return content;
  }

  async send(text) {
    this.#messages.push({ role: "user", content: text });
    new MessageView("user").add(text);
    await this.#answer(text);
  }

  /** Replace the last answer by another one. */
  async regenerate() {
    this.#messages.pop();
    $("messages").lastElementChild.remove();
    await this.#answer(this.#messages.at(-1).content);
  }

  async #answer(text) {
    const messages = this.#messages;
    const view = new MessageView("assistant");
    $("scroll").scrollTop = $("scroll").scrollHeight;
    const running = new AbortController();
    this.#running = running;
    this.#showState();
    view.isRunning = true;
    view.add("");
    try {
      await this.#receive(messages, view, running.signal);
      announce("Response complete.");
    } catch (error) {
      if (running.signal.aborted) {
        view.note("Stopped.");
      } else {
        view.note(error.message, "problem");
        announce(`Request failed: ${error.message}`);
      }
    } finally {
      view.isRunning = false;
      if (view.text || view.reasoning) {
        const reasoning = view.reasoning ? { reasoning: view.reasoning } : {};
        messages.push({ role: "assistant", content: view.text, ...reasoning });
        // The user may have begun another conversation.
        if (messages === this.#messages) this.#history.save(this.#id, messages);
      } else {
        // A request that failed without output leaves the conversation and can be sent again.
        messages.pop();
        if (!$("text").value) $("text").value = text;
        fitComposer();
      }
      // A message that failed is shown, but it is no part of the conversation.
      if (messages === this.#messages) this.#canRedo = Boolean(view.text || view.reasoning);
      if (this.#running === running) this.#running = null;
      this.#showState();
    }
  }

  async #receive(messages, view, signal) {
    const startedMs = performance.now();
    let firstMs = 0;
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify(this.#body(messages)),
      signal,
    });
    if (!response.ok) throw new Error(await errorMessageOf(response));
    let usage = null;
    let reason = null;
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(String(event.error.message));
      usage = event.usage ?? usage;
      for (const choice of event.choices ?? []) {
        if (choice.delta?.reasoning || choice.delta?.content) firstMs ||= performance.now();
        if (choice.delta?.reasoning) view.addReasoning(choice.delta.reasoning);
        if (choice.delta?.content) view.add(choice.delta.content);
        reason = choice.finish_reason ?? reason;
      }
    }
    if (reason === null) throw new Error("The connection closed before the response was complete.");
    const endedMs = performance.now();
    const tokens = usage ? `${usage.completion_tokens} tokens in ` : "";
    const parts = [`${tokens}${formatSeconds((endedMs - startedMs) / 1000)}`];
    if (firstMs) parts.push(`first after ${formatSeconds((firstMs - startedMs) / 1000)}`);
    if (usage?.completion_tokens > 1 && endedMs > firstMs && firstMs) {
      const rate = ((usage.completion_tokens - 1) * 1000) / (endedMs - firstMs);
      parts.push(`${formatNumber(rate)} tokens/s`);
    }
    const cut = reason === "length" ? "; cut off at the token limit" : "";
    view.note(`${parts.join(", ")}${cut}`);
  }

  #body(messages) {
    const system = $("system").value.trim();
    const stop = $("stop-text").value;
    return {
      model: this.#stats.model || undefined,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      temperature: numberIn("temperature"),
      top_p: numberIn("top-p"),
      top_k: numberIn("top-k"),
      min_p: numberIn("min-p"),
      repetition_penalty: numberIn("repetition-penalty"),
      presence_penalty: numberIn("presence-penalty"),
      frequency_penalty: numberIn("frequency-penalty"),
      seed: numberIn("seed"),
      stop: stop || undefined,
      max_completion_tokens: numberIn("max-tokens"),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  #showState() {
    $("send").hidden = this.isRunning;
    $("stop").hidden = !this.isRunning;
    $("actions").hidden = this.isRunning || !this.#canRedo;
  }
}

function newId() {
  return `${Date.now()}-${Math.random()}`;
}

/** Return the number in a field; undefined leaves it to the server. */
function numberIn(id) {
  const number = Number.parseFloat($(id).value);
  return Number.isFinite(number) ? number : undefined;
}

function announce(text) {
  $("announcement").textContent = text;
}

// ---- Controls ----

function fitComposer() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

function main() {
  const stats = new Stats();
  const history = new History();
  const chat = new Chat(stats, history);

  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("text").value.trim();
    if (!text || chat.isRunning) return;
    $("text").value = "";
    fitComposer();
    chat.send(text);
  });
  $("text").addEventListener("input", fitComposer);
  $("text").addEventListener("keydown", (event) => {
    // Enter also confirms the composition of an input method.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") chat.stop();
  });
  $("stop").addEventListener("click", () => {
    chat.stop();
    $("text").focus();
  });
  $("again").addEventListener("click", () => chat.regenerate());
  $("edit").addEventListener("click", () => {
    $("text").value = chat.takeBack();
    fitComposer();
    $("text").focus();
  });
  const showHistory = (isShown) => {
    $("history").hidden = !isShown;
    $("history-button").setAttribute("aria-expanded", String(isShown));
    if (!isShown) return;
    history.show((found) => {
      chat.open(found);
      showHistory(false);
      $("text").focus();
    });
  };
  $("history-button").addEventListener("click", () => showHistory($("history").hidden));
  $("forget").addEventListener("click", () => {
    history.clear();
    showHistory(true);
  });
  $("new-chat").addEventListener("click", () => {
    chat.clear();
    $("text").focus();
  });
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings-button").addEventListener("click", () => {
    const settings = $("settings");
    settings.hidden = !settings.hidden;
    $("settings-button").setAttribute("aria-expanded", String(!settings.hidden));
    if (!settings.hidden) $("key").focus();
  });
  $("key").addEventListener("change", () => stats.refresh());
  const narrow = matchMedia("(max-width: 56rem)");
  const fold = () => {
    $("stats").open = !narrow.matches;
  };
  narrow.addEventListener("change", fold);
  fold();
  stats.start();
}

main();
