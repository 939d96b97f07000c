// The current load of the server: sequences, blocks, counts, running calls.

import { byId, make } from "../dom.js";
import { formatCount, formatNumber, formatPercent, formatSeconds } from "../format.js";

const MAX_CALLS = 20;

export class LoadView {
  #last = null;

  /** Show what the server reports; return the generated tokens/s since the last report, or null. */
  show(loads) {
    const before = this.#last;
    this.#last = loads;
    const passed = before ? loads.uptime_s - before.uptime_s : 0;
    const rate = (name) => (passed > 0 ? Math.max(0, loads[name] - before[name]) / passed : 0);
    const texts = {
      "prompt-rate": formatNumber(rate("num_prompt_tokens")),
      running: formatCount(loads.num_running),
      waiting: formatCount(loads.num_waiting),
      swapped: formatCount(loads.num_swapped),
      step: formatSeconds(loads.last_step_s),
      hits: formatPercent(loads.num_hit_tokens, loads.num_queried_tokens),
      drafts: draftText(loads),
      preemptions: formatCount(loads.num_preemptions),
      uptime: formatSeconds(loads.uptime_s),
    };
    for (const [id, text] of Object.entries(texts)) byId(id).textContent = text;
    showPool("device", loads.num_blocks, loads.num_free_blocks, loads.num_cached_blocks);
    showPool("cpu", loads.num_cpu_blocks, loads.num_free_cpu_blocks, 0);
    showCalls(loads.calls);
    return passed > 0 ? rate("num_generated_tokens") : null;
  }
}

/** Return the accepted share of drafts, and the tokens of a sequence with drafts in a step. */
function draftText(loads) {
  const accepted = loads.num_accepted_draft_tokens;
  if (!loads.num_chains) return "none";
  const length = formatNumber(1 + accepted / loads.num_chains);
  return `${formatPercent(accepted, loads.num_draft_tokens)}, ${length} tokens/step`;
}

function showPool(name, size, numFree, numCached) {
  const share = (part) => (size ? (100 * part) / size : 0);
  byId(`${name}-text`).textContent = size ? `${formatCount(size - numFree)} of ${formatCount(size)}` : "none";
  byId(`${name}-meter`).setAttribute("aria-valuenow", Math.round(share(size - numFree)));
  byId(`${name}-used`).style.width = `${share(size - numFree)}%`;
  byId(`${name}-cached`).style.width = `${share(numCached)}%`;
}

function showCalls(calls) {
  const rows = calls.slice(0, MAX_CALLS).map((call) => {
    const texts = [
      call.id,
      formatSeconds(call.age_s),
      formatCount(call.num_prompt_tokens),
      formatCount(call.num_generated_tokens),
    ];
    const cells = texts.map((text) => make("td", { textContent: text }));
    cells[0].title = call.id;
    return make("tr", {}, ...cells);
  });
  byId("calls-body").replaceChildren(...rows);
  byId("calls").hidden = rows.length === 0;
  const numOthers = calls.length - rows.length;
  byId("no-calls").hidden = rows.length > 0 && numOthers === 0;
  byId("no-calls").textContent = numOthers > 0 ? `${formatCount(numOthers)} more not shown.` : "No active requests.";
}
