// The last seconds of a GPU's leases, scrolling: solid while a vGPU holds a token, hatched and thin while it waits.

import { dark, solid } from "/static/colour.js";
import { el, paint, say, set } from "/static/dom.js";
import { duration, middle, short } from "/static/format.js";

const KEPT_MS = 12_000;
const BEHIND_MS = 450; // what is drawn is that old: they come together, four or five times a second
const FRAME_MS = 160;
const CALM_FRAME_MS = 500;
const MANY_LANES = 16; // of more, each is thin, and all of them cost
const MANY_FRAME_MS = 480;
const GUTTER = 150;
const NARROW_GUTTER = 96; // on a phone
const LEAST_LANE = 11; // a name is legible
const LETTER_PX = 6.2;
const SPANS_S = [2, 5, 10];

export class Timeline {
  constructor(gpu) {
    this.gpu = gpu;
    this.spanS = 5;
    this.offsetMs = null;
    this.forget();
    this.lanes = [];
    this.hatches = new Map();
    this.canvas = el("canvas", { role: "img", tabindex: "-1" });
    this.read = el("p", { class: "readout" });
    this.spans = SPANS_S.map((span) => el("button", {
      type: "button", class: "quiet", "aria-pressed": String(span === this.spanS), onclick: () => this.choose(span),
    }, `${span} s`));
    this.pauseButton = el("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.pause() }, "Pause");
    this.node = el("div", { class: "timeline" }, el("div", { class: "strip" },
      el("h3", {}, "Leases"), this.read, el("span", { class: "segments", role: "group", "aria-label": "Seconds shown" }, ...this.spans),
      this.pauseButton), this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.at = null));
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    document.addEventListener("visibilitychange", () => this.wanted && (document.hidden ? this.stop() : this.start()));
    this.seen = new IntersectionObserver(([entry]) => (this.onScreen = entry.isIntersecting));
    this.seen.observe(this.canvas);
    this.resized = new ResizeObserver(([entry]) => (this.width = Math.floor(entry.contentRect.width)));
    this.resized.observe(this.canvas);
  }

  open() {
    this.wanted = true;
    if (!document.hidden) this.start();
  }

  close() {
    this.wanted = false;
    this.stop();
  }

  gone() {
    this.close();
    this.seen.disconnect();
    this.resized.disconnect();
  }

  start() {
    if (this.source) return;
    this.source = new EventSource(`/api/v1/gpus/${this.gpu}/timeline`);
    this.source.addEventListener("chunk", (message) => this.hear(JSON.parse(message.data)));
    this.source.addEventListener("failure", (message) => (this.failure = JSON.parse(message.data)));
    this.timer = setInterval(() => this.tick(), FRAME_MS);
  }

  stop() {
    this.source?.close();
    this.source = null;
    clearInterval(this.timer);
    this.offsetMs = null;
    this.forget();
  }

  // By vGPU: what is over, oldest first, and what is under way.
  forget() {
    this.done = new Map();
    this.underWay = new Map();
  }

  pause() {
    this.pausedMs = this.pausedMs == null ? this.nowMs() : null;
    set(this.pauseButton, "aria-pressed", String(this.pausedMs != null));
    say(this.pauseButton, this.pausedMs == null ? "Pause" : "Go on");
  }

  choose(span) {
    this.spanS = span;
    this.spans.forEach((button, i) => set(button, "aria-pressed", String(SPANS_S[i] === span)));
  }

  // `lanes`: [{ id, name, hue }], from below the picture's left to its right.
  told(lanes) {
    this.lanes = lanes;
  }

  hear(chunk) {
    this.failure = null;
    const untilMs = chunk.until_ns / 1e6;
    const behindMs = untilMs - performance.now();
    // The least delayed chunk best shows the offset of the server's clock; clocks drift, so it is forgotten slowly.
    if (this.offsetMs === null || Math.abs(behindMs - this.offsetMs) > 5000) this.offsetMs = behindMs;
    else this.offsetMs = Math.max(behindMs, this.offsetMs - 0.05);
    for (const record of chunk.records) sort(this.done, spanOf(record, untilMs));
    this.underWay = new Map();
    for (const record of chunk.under_way) sort(this.underWay, spanOf(record, untilMs));
    if (this.pausedMs != null || untilMs < (this.trimMs ?? 0)) return;
    this.trimMs = untilMs + 1000;
    for (const [id, spans] of this.done) {
      const first = spans.findIndex((span) => span.end > untilMs - KEPT_MS);
      if (first < 0) this.done.delete(id);
      else spans.splice(0, first);
    }
  }

  nowMs() {
    return performance.now() + (this.offsetMs ?? 0) - BEHIND_MS;
  }

  tick() {
    if (!this.onScreen || this.drawing) return;
    const nowMs = performance.now();
    const leastMs = this.calm.matches ? CALM_FRAME_MS : this.lanes.length > MANY_LANES ? MANY_FRAME_MS : 0;
    if (nowMs - (this.drawnMs ?? 0) < leastMs) return;
    this.drawnMs = nowMs;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.draw();
    });
  }

  draw() {
    const lanes = this.lanes;
    const lane = Math.max(LEAST_LANE, Math.min(20, Math.floor(240 / Math.max(1, lanes.length))));
    const height = Math.max(40, lanes.length * lane) + 18;
    const scale = Math.min(2, devicePixelRatio || 1);
    const width = this.width ?? this.canvas.clientWidth;
    if (this.canvas.width !== width * scale || this.canvas.height !== height * scale) {
      this.canvas.width = width * scale;
      this.canvas.height = height * scale;
      paint(this.canvas, "height", `${height}px`);
    }
    const context = this.canvas.getContext("2d", { alpha: true });
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const gutter = width > 520 ? GUTTER : NARROW_GUTTER;
    const place = { gutter, lane, width, height, endMs: this.pausedMs ?? this.nowMs(), perMs: (width - gutter) / (this.spanS * 1000) };
    this.place = place;
    if (!this.inkOf || this.inkOf.dark !== dark()) this.inkOf = { dark: dark(), colour: getComputedStyle(this.canvas).color };
    const ink = this.inkOf.colour;
    this.grid(context, place, ink);
    this.bars(context, place);
    this.words(context, place, ink);
    this.describe(place);
  }

  grid(context, { gutter, width, height, endMs, perMs }, ink) {
    context.fillStyle = ink;
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "center";
    const step = this.spanS <= 2 ? 250 : this.spanS <= 5 ? 500 : 1000;
    for (let at = Math.floor(endMs / step) * step; at > endMs - this.spanS * 1000; at -= step) {
      const x = width - (endMs - at) * perMs;
      context.globalAlpha = 0.13;
      context.fillRect(Math.round(x), 0, 1, height - 16);
    }
    context.globalAlpha = 0.7;
    for (let s = 1; s < this.spanS; s += this.spanS > 5 ? 2 : 1) {
      const x = width - s * 1000 * perMs;
      if (x > gutter + 14) context.fillText(`−${s} s`, x, height - 4);
    }
    context.textAlign = "right";
    context.fillText("now", width, height - 4);
    context.globalAlpha = 1;
  }

  // Lane by lane, waits before leases: naming a colour is what costs.
  bars(context, { gutter, lane, width, endMs, perMs }) {
    const fromMs = endMs - this.spanS * 1000;
    const gap = lane > 8 ? 2 : 1;
    const thin = Math.max(2, Math.round(lane * 0.3));
    this.lanes.forEach(({ id, hue }, i) => {
      for (const lease of [false, true]) {
        let named = false;
        for (const spans of [this.done.get(id), this.underWay.get(id)]) {
          for (const span of spans ?? []) {
            const end = span.open ? Math.max(span.end, endMs) : span.end;
            if (span.lease !== lease || end < fromMs || span.begin > endMs) continue;
            if (!named) context.fillStyle = lease ? solid(hue) : this.hatch(context, hue);
            named = true;
            const left = Math.max(gutter, width - (endMs - span.begin) * perMs);
            const long = Math.min(width, width - (endMs - end) * perMs) - left;
            if (lease) context.fillRect(left, i * lane + gap / 2, Math.max(0.75, long - 0.35), lane - gap);
            else if (long > 0) context.fillRect(left, i * lane + ((lane - thin) >> 1), long, thin);
          }
        }
      }
    });
  }

  hatch(context, hue) {
    const key = `${hue} ${dark()}`;
    let pattern = this.hatches.get(key);
    if (!pattern) {
      const tile = el("canvas", { width: 6, height: 6 });
      const pen = tile.getContext("2d");
      pen.strokeStyle = solid(hue);
      pen.lineWidth = 1.4;
      pen.beginPath();
      for (const from of [-6, 0, 6]) {
        pen.moveTo(from - 1, 7);
        pen.lineTo(from + 7, -1);
      }
      pen.stroke();
      pattern = context.createPattern(tile, "repeat");
      this.hatches.set(key, pattern);
    }
    return pattern;
  }

  words(context, { gutter, lane, width }, ink) {
    context.fillStyle = ink;
    context.textAlign = "left";
    context.font = "11px system-ui, sans-serif";
    if (gutter) {
      this.lanes.forEach(({ name }, i) => context.fillText(middle(name, Math.floor(gutter / LETTER_PX) - 1), 0, i * lane + lane / 2 + 4));
    }
    if (this.failure) context.fillText(this.failure.error, gutter + 8, 24, width - gutter - 16);
  }

  // In words, twice a second at most: for people that do not see it, and what the pointer is on.
  describe(place) {
    const nowMs = performance.now();
    if (nowMs - (this.describedMs ?? 0) < 400) return;
    this.describedMs = nowMs;
    const empty = !this.done.size && !this.underWay.size;
    if (this.at) say(this.read, this.under(place, this.at) ?? "");
    else if (empty && this.lanes.length && !this.failure) say(this.read, "No token was wanted: start a program with vgpuctl exec");
    else say(this.read, "solid: holds a token; hatched: waits for one");
    if (nowMs - (this.labelledMs ?? 0) < 2000) return;
    this.labelledMs = nowMs;
    const fromMs = place.endMs - this.spanS * 1000;
    const parts = this.lanes.map(({ id, name }) => {
      let held = 0;
      for (const span of this.of(id)) {
        const end = span.open ? place.endMs : Math.min(span.end, place.endMs);
        if (span.lease) held += Math.max(0, end - Math.max(span.begin, fromMs));
      }
      return [name, Math.min(1, held / (this.spanS * 1000))];
    });
    const said = parts.filter(([, part]) => part > 0).slice(0, 8).map(([name, part]) => `${name} ${short(part)}`);
    set(this.canvas, "aria-label", `Leases of the last ${this.spanS} seconds. Held: ${said.join(", ") || "by no vGPU"}`);
  }

  of(id) {
    return [...(this.done.get(id) ?? []), ...(this.underWay.get(id) ?? [])];
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.at = { x: event.clientX - box.left, y: event.clientY - box.top };
    this.describedMs = 0;
  }

  under({ lane, width, endMs, perMs }, { x, y }) {
    const row = this.lanes[Math.floor(y / lane)];
    if (!row) return null;
    const atMs = endMs - (width - x) / perMs;
    const slackMs = 1 / perMs;
    const near = (span) => span.begin - slackMs <= atMs && (span.open || span.end + slackMs >= atMs);
    const span = this.of(row.id).findLast(near);
    if (!span) return `${row.name}: neither held nor waited`;
    const length = duration((span.open ? endMs - span.begin : span.end - span.begin) * 1e6);
    return span.lease ? `${row.name}: held a ${span.shared ? "shared token" : "token"} for ${length}, ${span.ended}` : `${row.name}: waited ${length}`;
  }
}

const HOW = { ended: "to its end", returned: "returned early", revoked: "revoked", removed: "removed", "in-force": "in force" };

function sort(spans, span) {
  const of = spans.get(span.id);
  if (of) of.push(span);
  else spans.set(span.id, [span]);
}

function spanOf(record, untilMs) {
  if (record.kind === "lease") {
    const end = record.drained_ns ?? record.end_ns;
    const open = record.drained_ns === null;
    return { lease: true, id: record.vgpu_id, begin: record.go_ns / 1e6, end: open ? untilMs : end / 1e6, open, shared: record.shared, ended: HOW[record.ended] };
  }
  return { lease: false, id: record.vgpu_id, begin: record.begin_ns / 1e6, end: record.end_ns / 1e6, open: record.ended === "still-waits" };
}
