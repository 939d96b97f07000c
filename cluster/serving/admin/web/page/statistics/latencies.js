// The latencies of the last minute, as a table.

import { byId, make } from "../dom.js";
import { formatSeconds } from "../format.js";

/** Show the latencies in a history of the server's load. */
export function showLatencies(history) {
  const rows = [
    ["First token", history.first_token],
    ["Between tokens", history.between_tokens],
  ].map(([name, latency]) =>
    make(
      "tr",
      {},
      make("th", { scope: "row", textContent: name }),
      ...[latency.p50_s, latency.p90_s, latency.p99_s].map((seconds) =>
        make("td", { textContent: seconds === null ? "-" : formatSeconds(seconds) }),
      ),
    ),
  );
  byId("latencies").replaceChildren(...rows);
}
