// What an empty conversation shows: the model and what it runs on.

import { byId, make } from "./dom.js";
import { formatCount } from "./format.js";

/** Fill the card. */
export function showIdleCard(info, server) {
  byId("idle-model").textContent = info.model;
  byId("idle-model").style.setProperty("--length", info.model.length);
  const rows = rowsOf(info).map(([term, value]) =>
    make("div", {}, make("dt", { textContent: term }), make("dd", { textContent: value, title: value })),
  );
  byId("idle-rows").replaceChildren(...rows);
  // A browser that follows a link sends no key.
  byId("idle-links").hidden = server.hasKey;
  byId("idle-paths").hidden = !server.hasKey;
}

function rowsOf(info) {
  const weights = info.quantization ? `${info.dtype}, ${info.quantization} weights` : info.dtype;
  const device = info.device === "cuda" ? "CUDA" : info.device.toUpperCase();
  const numTokens = info.num_blocks * info.block_size;
  return [
    ["Context length", `${formatCount(info.context_length)} tokens`],
    ["Data type", weights],
    ["Device", info.num_ranks > 1 ? `${info.num_ranks} \u00d7 ${device}` : device],
    ["Attention backend", info.attention_backend],
    ["KV cache", `${formatCount(numTokens)} tokens`],
    ["KV cache type", info.kv_cache_dtype],
    ["Architecture", info.architecture],
    ["Maximum sequences per step", formatCount(info.max_num_seqs)],
    ["PagedRay", info.version],
  ];
}
