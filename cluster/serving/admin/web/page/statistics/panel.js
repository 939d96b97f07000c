// The panel of statistics.

import { byId } from "../dom.js";
import { Charts } from "./charts.js";
import { showLatencies } from "./latencies.js";
import { LoadView } from "./load_view.js";

export class Panel {
  #charts = new Charts();
  #loads = new LoadView();

  showLoads(loads) {
    this.#charts.drawSpeed(loads.uptime_s, this.#loads.show(loads));
  }

  /** Show a history; null if the key is not an admin's, whose totals would be 0. */
  showHistory(history) {
    const isAdmin = history !== null;
    for (const node of document.querySelectorAll(".totals")) node.hidden = !isAdmin;
    byId("no-totals").hidden = isAdmin;
    if (!isAdmin) return;
    this.#charts.draw(history);
    showLatencies(history);
  }
}
