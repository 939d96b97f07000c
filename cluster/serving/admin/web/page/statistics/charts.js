// The charts of the last ten minutes.

import { byId } from "../dom.js";
import { formatNumber, formatPercent, formatSeconds } from "../format.js";
import { LineChart, SPAN_S } from "./line_chart.js";

export class Charts {
  #speed = new LineChart("Generated tokens/s", [""], formatNumber);
  #firstToken = new LineChart("First token", ["p50", "p95"], formatSeconds);
  #blocks = new LineChart("KV cache in use", [""], (part) => formatPercent(part, 1));
  #samples = [];

  constructor() {
    byId("charts").append(this.#speed.node, this.#firstToken.node, this.#blocks.node);
  }

  /** Draw the speeds of the history and the present one, null if it is not known. */
  drawSpeed(uptime, speed) {
    const present = speed === null ? [] : [{ uptime_s: uptime, generated_tokens_per_s: speed }];
    const samples = [...this.#samples, ...present];
    this.#speed.draw(pointsOf(samples, (sample) => [sample.generated_tokens_per_s]), {
      emptyText: emptyText(samples),
    });
  }

  /** Draw a history of the server's load; the next `drawSpeed` draws its speeds. */
  draw({ num_blocks: numBlocks, samples }) {
    this.#samples = samples;
    this.#firstToken.draw(
      pointsOf(samples, (sample) => [sample.first_token_p50_s, sample.first_token_p95_s]),
      { leastTop: 0.01, emptyText: emptyText(samples) },
    );
    this.#blocks.draw(
      pointsOf(samples, (sample) => [numBlocks ? sample.num_used_blocks / numBlocks : 0]),
      { top: 1 },
    );
  }
}

function pointsOf(samples, values) {
  const now = samples.at(-1)?.uptime_s ?? 0;
  return samples.map((sample) => ({ age: now - sample.uptime_s, values: values(sample) }));
}

function emptyText(samples) {
  return samples.at(-1)?.uptime_s > SPAN_S ? "no recent calls" : "no calls yet";
}
