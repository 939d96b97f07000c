// A chart of the last ten minutes: a line for each series, and the values under the pointer.

import { make } from "../dom.js";

const WIDTH = 300;
const HEIGHT = 64;
/** How far back charts go. */
export const SPAN_S = 600;
const SVG = "http://www.w3.org/2000/svg";

export class LineChart {
  #lines;
  #area;
  #cursor = shape("line", { class: "cursor", y1: 0, y2: HEIGHT });
  #top = make("span", { className: "top" });
  #value = make("span", { className: "value" });
  #svg;
  #title;
  #format;
  #names;
  #points = [];
  #emptyText = null;
  #pointerX = null;

  /** `names` are those of the series; `format` returns a value as text. */
  constructor(title, names, format) {
    this.#title = title;
    this.#names = names;
    this.#format = format;
    this.#lines = names.map((_, index) => shape("path", { class: `line series-${index}` }));
    this.#area = shape("path", { class: "area" });
    this.#svg = shape("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
    });
    this.#svg.append(
      shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
      shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: 0.5, y2: 0.5 }),
      this.#area,
      ...this.#lines,
      this.#cursor,
    );
    this.node = make(
      "figure",
      { className: "chart" },
      make("figcaption", {}, make("h2", { textContent: title }), this.#value),
      make("div", { className: "plot" }, this.#svg, this.#top),
      make(
        "p",
        { className: "axis" },
        make("span", { textContent: "10 min ago" }),
        make("span", { textContent: "now" }),
      ),
    );
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("pointerleave", () => this.#point(null));
    this.#point(null);
  }

  /**
   * Draw points `{ age, values }`, the oldest first; a value of null interrupts its line. If all
   * are 0 or null, `emptyText` is shown in place of values.
   */
  draw(points, { top = null, leastTop = 1, emptyText = null } = {}) {
    this.#points = points.filter(({ age }) => age <= SPAN_S);
    const values = this.#points.flatMap((point) => point.values).filter((value) => value !== null);
    const most = top ?? niceTop(Math.max(leastTop, ...values));
    this.#emptyText = values.some((value) => value > 0) ? null : emptyText;
    this.#top.textContent = this.#emptyText === null ? this.#format(most) : "";
    this.#lines.forEach((line, index) => line.setAttribute("d", this.#path(index, most)));
    const [first, last] = [this.#points.at(0), this.#points.at(-1)];
    const isWhole = first && this.#points.every((point) => point.values[0] !== null);
    this.#area.setAttribute(
      "d",
      isWhole ? `${this.#path(0, most)}L${xOf(last)} ${HEIGHT}L${xOf(first)} ${HEIGHT}Z` : "",
    );
    const newest = this.#emptyText ?? (last ? this.#text(last) : "no data yet");
    this.#svg.setAttribute("aria-label", `${this.#title} over the last ten minutes; now ${newest}`);
    this.#showValue();
  }

  #path(index, most) {
    let path = "";
    let isDown = false;
    for (const point of this.#points) {
      const value = point.values[index];
      if (value === null) {
        isDown = false;
        continue;
      }
      const y = HEIGHT - 1 - ((HEIGHT - 3) * Math.min(value, most)) / most;
      // A point between two gaps is a dot.
      path += `${isDown ? "L" : "M"}${xOf(point)} ${y.toFixed(1)}${isDown ? "" : "h.01"}`;
      isDown = true;
    }
    return path;
  }

  #point(event) {
    const box = this.#svg.getBoundingClientRect();
    this.#pointerX = event === null ? null : ((event.clientX - box.left) / box.width) * WIDTH;
    this.#showValue();
  }

  #showValue() {
    const found = this.#pointerX === null ? this.#points.at(-1) : this.#nearest();
    const age = this.#pointerX !== null && found ? ` \u00b7 ${Math.round(found.age)} s ago` : "";
    this.#value.classList.toggle("none", this.#emptyText !== null);
    this.#value.textContent = this.#emptyText ?? (found ? this.#text(found) + age : "");
    this.#cursor.style.display = this.#pointerX !== null && found ? "" : "none";
    if (found) {
      this.#cursor.setAttribute("x1", xOf(found));
      this.#cursor.setAttribute("x2", xOf(found));
    }
  }

  #nearest() {
    const age = SPAN_S * (1 - this.#pointerX / WIDTH);
    return this.#points.reduce(
      (best, point) =>
        best === null || Math.abs(point.age - age) < Math.abs(best.age - age) ? point : best,
      null,
    );
  }

  #text(point) {
    if (point.values.every((value) => value === null)) return "-";
    return this.#names
      .map((name, index) => {
        const value = point.values[index];
        const text = value === null ? "-" : this.#format(value);
        return name ? `${name} ${text}` : text;
      })
      .join(", ");
  }
}

function xOf({ age }) {
  return (WIDTH * (1 - age / SPAN_S)).toFixed(1);
}

/** Return a round number with some room above a value, where the label is. */
function niceTop(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10, 15].map((factor) => factor * unit).find((top) => top >= value * 1.15);
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
