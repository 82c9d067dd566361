// Days of history: what users and vGPUs were promised, used and wasted, as stacked bars. It takes the place of the GPUs.

import { $, el, say, set, show } from "/static/dom.js";
import { ask } from "/static/node.js";

const HOUR_S = 3600;
const RANGES = {
  "24 h": { stepS: HOUR_S, steps: 24, alignH: 1, mark: 6, label: (date) => date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }) },
  "7 d": { stepS: 6 * HOUR_S, steps: 28, alignH: 6, mark: 4, label: (date) => date.toLocaleDateString("en-GB", { weekday: "short", day: "numeric" }) },
  "30 d": { stepS: 24 * HOUR_S, steps: 30, alignH: 24, mark: 7, label: (date) => date.toLocaleDateString("en-GB", { day: "numeric", month: "short" }) },
};
const AGAIN_MS = 30_000;
const PARTS = [["used", "used of the promise"], ["beyond", "used beyond the promise"], ["wasted", "wasted"]];
const WIDTH = 600;

const nothing = () => ({ promised: 0, used: 0, wasted: 0, beyond: 0, memory: 0, had: 0, measured: 0 });

function add(sums, row) {
  sums.promised += row.promised_gpu_hours;
  sums.used += row.used_gpu_hours;
  sums.wasted += row.wasted_gpu_hours;
  sums.beyond += Math.max(0, row.used_gpu_hours - (row.promised_gpu_hours - row.wasted_gpu_hours));
  sums.memory += row.memory_promised_gib_hours;
  sums.had += row.memory_used_gib_hours;
  sums.measured += row.measured_hours;
}

const hours = (value) => (value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));
const part = (sums) => (sums.promised ? `${((100 * sums.wasted) / sums.promised).toFixed(0)} % wasted` : "");
const said = (sums) => `${hours(sums.promised)} GPU-h promised, ${hours(sums.used)} used, ${hours(sums.wasted)} wasted`;

// When the bars begin: at a whole hour, quarter of a day or midnight here, so that the last bar has the present.
export function begin(range, now) {
  const { steps, alignH, stepS } = RANGES[range];
  const start = new Date(now);
  start.setHours(Math.floor(start.getHours() / alignH) * alignH, 0, 0, 0);
  return Math.floor(start.getTime() / 1000) - (steps - 1) * stepS;
}

// The rows of an answer by subject, each with its sums in all and by step; the largest first.
export function subjects(report, by, range) {
  const { stepS, steps } = RANGES[range];
  const found = new Map();
  for (const row of report.rows) {
    const key = by === "user" ? String(row.owner_uid) : `${row.owner_uid} ${row.vgpu_id}`;
    const user = row.user || `uid ${row.owner_uid}`;
    if (!found.has(key)) found.set(key, { key, name: by === "user" ? user : row.name || row.vgpu_id, note: by === "user" ? "" : `${row.name ? `${row.vgpu_id}, ` : ""}${user}`, sums: nothing(), bars: Array.from({ length: steps }, nothing) });
    const subject = found.get(key);
    add(subject.sums, row);
    const bar = subject.bars[Math.round((row.start_unix_s - report.since_unix_s) / stepS)];
    if (bar) add(bar, row);
  }
  return [...found.values()].sort((a, b) => b.sums.promised + b.sums.used - a.sums.promised - a.sums.used);
}

const rect = (kind, x, y, width, height) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ class: kind, x, y, width, height })) made.setAttribute(name, value);
  return made;
};

// Bars of one subject; `top`: the GPU-hours at their upper end.
function drawBars(bars, top, since, range, height) {
  const svg = el("svg", { class: "bars", viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const each = WIDTH / bars.length;
  bars.forEach((bar, i) => {
    const group = document.createElementNS("http://www.w3.org/2000/svg", "g");
    const tip = document.createElementNS("http://www.w3.org/2000/svg", "title");
    tip.textContent = `${new Date((since + i * RANGES[range].stepS) * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}: ${bar.measured ? said(bar) : "not measured"}`;
    group.append(tip, rect("hit", i * each, 0, each, height));
    let y = height;
    for (const [kind, value] of [["used", bar.promised - bar.wasted], ["beyond", bar.beyond], ["wasted", bar.wasted]]) {
      const tall = Math.max(0, (height * value) / top);
      if (tall < 0.05) continue;
      y -= tall;
      group.append(rect(kind, i * each + each * 0.1, y, each * 0.8, tall));
    }
    svg.append(group);
  });
  return svg;
}

export class Usage {
  constructor() {
    this.range = "24 h";
    this.by = "user";
    this.shown = false;
    for (const range of Object.keys(RANGES)) $("usage-ranges").append(this.choice("range", range, range));
    for (const by of ["user", "vgpu"]) $("usage-by").append(this.choice("by", by, by === "user" ? "by user" : "by vGPU"));
    for (const [kind, words] of PARTS) $("usage-legend").append(el("li", { class: kind }, words));
    $("usage-open").addEventListener("click", () => this.toggle());
  }

  choice(field, value, words) {
    return el("button", { type: "button", class: "quiet", "data-field": field, "data-value": value, onclick: () => this.choose(field, value) }, words);
  }

  choose(field, value) {
    this[field] = value;
    this.load();
  }

  toggle() {
    this.shown = !this.shown;
    show($("usage"), this.shown);
    show($("gpus"), !this.shown);
    set($("usage-open"), "aria-pressed", String(this.shown));
    if (this.shown) this.load();
  }

  async load() {
    clearTimeout(this.timer);
    document.querySelectorAll("#usage button[data-field]").forEach((button) => set(button, "aria-pressed", String(this[button.dataset.field] === button.dataset.value)));
    if (!this.shown) return;
    const { range, by } = this;
    const since = begin(range, Date.now());
    try {
      const report = await ask("GET", `usage?by=${by}&since_unix_s=${since}&step_s=${RANGES[range].stepS}`);
      if (range === this.range && by === this.by) this.draw(report, by, range);
    } catch (error) {
      this.remark([error.hint ? `${error.message}. ${error.hint}` : error.message]);
    }
    if (this.shown) this.timer = setTimeout(() => this.load(), AGAIN_MS);
  }

  remark(notes) {
    say($("usage-remark"), notes.join(" "));
    show($("usage-remark"), notes.length > 0);
  }

  draw(report, by, range) {
    this.remark(report.notes);
    const found = subjects(report, by, range);
    const { steps } = RANGES[range];
    const all = { name: "all", note: "", sums: nothing(), bars: Array.from({ length: steps }, nothing) };
    for (const subject of found) {
      for (const name of Object.keys(all.sums)) {
        all.sums[name] += subject.sums[name];
        subject.bars.forEach((bar, i) => (all.bars[i][name] += bar[name]));
      }
    }
    show($("usage-empty"), !found.length);
    show($("usage-shown"), found.length > 0);
    const figure = (label, value, note) => el("div", { class: "figure" }, el("dt", {}, label), el("dd", {}, el("b", {}, value), el("span", {}, note)));
    $("usage-figures").replaceChildren(
      figure("promised", hours(all.sums.promised), "GPU-h"), figure("used", hours(all.sums.used), "GPU-h"),
      figure("wasted", hours(all.sums.wasted), `GPU-h${all.sums.promised ? `, ${((100 * all.sums.wasted) / all.sums.promised).toFixed(0)} %` : ""}`),
      figure("memory promised", hours(all.sums.memory), "GiB-h"), figure("memory used", hours(all.sums.had), "GiB-h"));
    const top = Math.max(1e-9, ...all.bars.map((bar) => bar.promised + bar.beyond));
    say($("usage-top"), `${hours(top)} GPU-h`);
    $("usage-chart").replaceChildren(drawBars(all.bars, top, report.since_unix_s, range, 140));
    const { stepS, mark, label } = RANGES[range];
    $("usage-axis").replaceChildren(...all.bars.flatMap((_, i) => (i % mark || i > 0.9 * steps ? [] : [Object.assign(el("span", {}, label(new Date((report.since_unix_s + i * stepS) * 1000))), { at: i })])));
    for (const tick of $("usage-axis").children) tick.style.left = `${(100 * tick.at) / steps}%`;
    const highest = Math.max(1e-9, ...found.flatMap((subject) => subject.bars.map((bar) => bar.promised + bar.beyond)));
    $("usage-list").replaceChildren(...found.map((subject) => el("li", {},
      el("div", { class: "who" }, el("b", {}, subject.name), el("span", {}, subject.note)),
      drawBars(subject.bars, highest, report.since_unix_s, range, 36),
      el("div", { class: "sums" }, el("span", {}, said(subject.sums)), el("b", {}, part(subject.sums))))));
  }
}
