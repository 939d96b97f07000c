// The charts of the last ten minutes.

import { byId } from "../dom.js";
import { formatNumber, formatPercent, formatSeconds } from "../format.js";
import { LineChart } from "./line_chart.js";

export class Charts {
  #speed = new LineChart("Generated tokens/s", [""], formatNumber);
  #firstToken = new LineChart("First token", ["p50", "p95"], formatSeconds);
  #blocks = new LineChart("KV cache in use", [""], (part) => formatPercent(part, 1));

  constructor() {
    byId("charts").append(this.#speed.node, this.#firstToken.node, this.#blocks.node);
  }

  /** Draw a history of the server's load. */
  draw({ num_blocks: numBlocks, samples }) {
    const now = samples.at(-1)?.uptime_s ?? 0;
    const points = (values) =>
      samples.map((sample) => ({ age: now - sample.uptime_s, values: values(sample) }));
    this.#speed.draw(points((sample) => [sample.generated_tokens_per_s]));
    this.#firstToken.draw(
      points((sample) => [sample.first_token_p50_s, sample.first_token_p95_s]),
      { leastTop: 0.01 },
    );
    this.#blocks.draw(
      points((sample) => [numBlocks ? sample.num_used_blocks / numBlocks : 0]),
      { top: 1 },
    );
  }
}
