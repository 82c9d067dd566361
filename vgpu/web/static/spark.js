// A line of the last 90 seconds: one point a second, as two paths.

import { el, set } from "/static/dom.js";

export const SPAN_S = 90;
const WIDTH = 90;
const HEIGHT = 24;

export class Spark {
  constructor(label) {
    this.line = el("path", { class: "line" });
    this.area = el("path", { class: "area" });
    this.node = el("svg", {
      class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
    }, this.area, this.line);
    this.label = label;
    this.points = [];
  }

  // Whether there is a new point to draw.
  add(atS, value) {
    const last = this.points.at(-1);
    if (last && atS - last[0] < 0.9) return false;
    this.points.push([atS, value]);
    while (this.points.length > 1 && this.points[1][0] < atS - SPAN_S) this.points.shift();
    return true;
  }

  draw(nowS) {
    const points = this.points;
    if (points.length < 2) return;
    let top = 1e-9;
    for (const [, value] of points) if (value > top) top = value;
    top *= 1.1;
    let path = "";
    let last = 0;
    for (const [atS, value] of points) {
      const x = Math.max(0, WIDTH * (1 - (nowS - atS) / SPAN_S)).toFixed(1);
      path += `${path ? "L" : "M"}${x} ${(HEIGHT - 1 - (HEIGHT - 3) * (value / top)).toFixed(1)}`;
      last = x;
    }
    set(this.line, "d", path);
    const first = Math.max(0, WIDTH * (1 - (nowS - points[0][0]) / SPAN_S)).toFixed(1);
    set(this.area, "d", `${path}L${last} ${HEIGHT}L${first} ${HEIGHT}Z`);
  }
}
