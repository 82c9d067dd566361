// One GPU: its figures, its picture, its timeline, its vGPUs.

import { hueOf } from "/static/colour.js";
import { el, keyed, paint, say, set, show } from "/static/dom.js";
import { atOnce, bytesOf, count, duration, OPEN, percent, short, tokenRate, whole } from "/static/format.js";
import { Picture } from "/static/picture.js";
import { Row } from "/static/row.js";
import { Spark } from "/static/spark.js";
import { Timeline } from "/static/timeline.js";
import { Heading } from "/static/view.js";

const SORTED_MS = 4000; // rows move that often at most, and never below a pointer or a focus

class Figure {
  constructor(label, ...more) {
    this.value = el("b");
    this.note = el("span");
    this.node = el("div", { class: "figure" }, el("dt", {}, label), el("dd", {}, this.value, this.note, ...more));
  }

  tell(value, note = "") {
    show(this.node, value !== null);
    say(this.value, value ?? "");
    say(this.note, note);
  }
}

export class Gpu {
  constructor(index, page) {
    this.index = index;
    this.page = page;
    this.rows = new Map();
    this.items = new Map();
    this.groups = [];
    this.sortedMs = 0;
    this.places = new Map();
    this.spark = new Spark();
    for (const [atS, value] of page.pastOf("gpus", index)) this.spark.add(atS, value);
    this.title = el("h2", { id: `gpu-${index}` }, `GPU ${index}`);
    this.model = el("span", { class: "model" });
    this.simulated = el("span", { class: "pill simulated" }, "simulated");
    this.mode = el("span", { class: "pill" });
    this.state = el("span", { class: "state" });
    this.figures = {
      rate: new Figure("tokens/s", this.spark.node), held: new Figure("held"), busy: new Figure("busy"), promised: new Figure("promised"),
      memory: new Figure("memory"), used: new Figure("utilisation"), power: new Figure("power"),
    };
    this.picture = new Picture();
    this.timeline = new Timeline(index);
    this.remark = el("p", { class: "remark", hidden: true });
    this.list = el("ul", { class: "vgpus" });
    this.empty = el("p", { class: "empty" }, "No vGPU here yet. Type ", el("code", {}, "vgpuctl create --sm 30 --mem 8G"), ", or press ", el("kbd", {}, "n"), ". ",
      el("button", { type: "button", onclick: () => page.dialogs.create(index) }, "New vGPU here"));
    this.none = el("p", { class: "empty", hidden: true }, "No vGPU of this GPU fits the filter.");
    this.shown = el("button", { type: "button", class: "quiet", "aria-expanded": "false", onclick: () => this.showTimeline(!this.timelineShown) }, "Timeline");
    this.change = el("button", { type: "button", class: "quiet", "aria-label": `Change how GPU ${index} is shared`, onclick: () => page.sharing.open(this.gpu) }, "Change…");
    this.node = el("section", { class: "gpu", "aria-labelledby": `gpu-${index}` },
      el("header", {}, this.title, this.model, this.simulated, this.mode, this.state, el("span", { class: "grow" }), this.shown, this.change),
      this.remark,
      el("dl", { class: "figures" }, ...Object.values(this.figures).map((figure) => figure.node)),
      this.picture.node, this.timeline.node,
      el("div", { class: "heads", "aria-hidden": "true" }, ...["vGPU", "tokens/s", "share of time held", "memory", "waiting", "programs", ""].map((word) => el("span", {}, word))),
      this.list, this.empty, this.none);
    show(this.timeline.node, false);
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const row = this.rows.get(target.id);
        if (row) row.onScreen = isIntersecting;
      }
    }, { rootMargin: "200px" });
  }

  showTimeline(shown) {
    this.timelineShown = shown;
    set(this.shown, "aria-expanded", String(shown));
    show(this.timeline.node, shown);
    if (shown) this.timeline.open();
    else this.timeline.close();
  }

  gone() {
    this.timeline.gone();
    this.picture.gone();
    this.seen.disconnect();
  }

  // Places are kept: a vGPU has its colour for as long as it is here.
  hues(vgpus) {
    const here = new Set(vgpus.map((vgpu) => vgpu.vgpu_id));
    for (const id of this.places.keys()) if (!here.has(id)) this.places.delete(id);
    const taken = new Set(this.places.values());
    for (const { vgpu_id: id } of vgpus) {
      if (this.places.has(id)) continue;
      let place = 0;
      while (taken.has(place)) place += 1;
      taken.add(place);
      this.places.set(id, place);
    }
    return new Map([...this.places].map(([id, place]) => [id, hueOf(place)]));
  }

  draw(gpu, vgpus, fits, nowS) {
    this.gpu = gpu;
    const hues = this.hues(vgpus);
    this.drawHead(gpu, nowS);
    this.picture.draw(gpu, vgpus, hues);
    this.timeline.told(vgpus.map((vgpu) => ({ id: vgpu.vgpu_id, name: vgpu.name ?? vgpu.vgpu_id, hue: hues.get(vgpu.vgpu_id) })));
    const shown = vgpus.filter(fits);
    this.drawRows(shown, hues, nowS);
    show(this.empty, !vgpus.length);
    show(this.none, vgpus.length > 0 && !shown.length);
    show(this.shown, vgpus.length > 0);
  }

  drawRows(shown, hues, nowS) {
    const byId = new Map(shown.map((vgpu) => [vgpu.vgpu_id, vgpu]));
    const { view } = this.page;
    const chosen = `${view.order} ${view.group} ${[...byId.keys()].join(" ")}`;
    const due = performance.now() - this.sortedMs > SORTED_MS && !this.list.matches(":hover, :focus-within");
    if (chosen !== this.chosen || due) {
      this.chosen = chosen;
      this.sortedMs = performance.now();
      this.groups = view.sorted(shown).map(([group, vgpus]) => [group, vgpus.map((vgpu) => vgpu.vgpu_id)]);
    }
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    const keys = this.groups.flatMap(([group, ids]) => (group ? [`group ${group}`, ...ids] : ids));
    keyed(this.list, this.items, keys, (key) => (key.startsWith("group ") ? new Heading() : this.row(key)));
    if (focused && focused !== document.activeElement) focused.focus({ preventScroll: true });
    this.rows = new Map(keys.filter((key) => byId.has(key)).map((key) => [key, this.items.get(key)]));
    for (const [id, row] of this.rows) row.draw(byId.get(id), hues.get(id), nowS, this.gpu);
    for (const [group, ids] of this.groups) {
      if (!group) continue;
      const sum = (of) => ids.reduce((total, id) => total + of(byId.get(id)), 0);
      this.items.get(`group ${group}`).draw(group, [count(ids.length, "vGPU"), count(sum((vgpu) => vgpu.processes), "program"),
        bytesOf(sum((vgpu) => vgpu.memory_used_bytes), sum((vgpu) => vgpu.memory_limit_bytes))].join(", "));
    }
  }

  row(id) {
    const made = new Row(id, this.page);
    for (const [atS, value] of this.page.pastOf("vgpus", id)) made.spark.add(atS, value);
    this.seen.observe(made.node);
    return made;
  }

  drawHead(gpu, nowS) {
    const f = this.figures;
    this.spark.add(nowS, gpu.tokens_per_second);
    this.spark.draw(nowS);
    say(this.model, gpu.name);
    show(this.simulated, gpu.simulated);
    say(this.mode, gpu.mode);
    set(this.mode, "title", gpu.mode_reason || null);
    say(this.state, gpu.state);
    set(this.state, "data-state", gpu.state);
    const remark = [gpu.reason, gpu.mps_reason, gpu.outside.length ? `${count(gpu.outside.length, "process", "processes")} in no vGPU on it: vgpuctl ps --all` : ""];
    say(this.remark, remark.filter(Boolean).join("; "));
    show(this.remark, Boolean(this.remark.said));
    f.rate.tell(tokenRate(gpu));
    set(f.rate.value, "title", gpu.open_ended && OPEN);
    f.held.tell(whole(gpu.held_ratio), atOnce(gpu.held_ratio));
    f.busy.tell(whole(gpu.busy_ratio));
    const over = gpu.guaranteed_ratio > 1.0005 ? `${gpu.guaranteed_ratio.toFixed(1)} times over` : "";
    f.promised.tell(short(Math.min(1, gpu.guaranteed_ratio)), over || (gpu.mode === "temporal" ? "of the time" : "of SMs × time"));
    f.memory.tell(bytesOf(gpu.used_memory_bytes, gpu.total_memory_bytes));
    f.used.tell(gpu.utilization_ratio == null ? null : percent(gpu.utilization_ratio));
    const heat = gpu.temperature_c == null ? null : `${gpu.temperature_c.toFixed(0)} °C`;
    const clock = gpu.sm_clock_mhz == null ? null : `${gpu.sm_clock_mhz.toFixed(0)} MHz`;
    const [first = null, ...others] = [gpu.power_w == null ? null : `${gpu.power_w.toFixed(0)} W`, heat, clock].filter(Boolean);
    f.power.tell(first, others.join(", "));
    set(this.title, "title", `round ${duration(gpu.period_ns)}, window ${duration(gpu.window_ns)}, server ${gpu.server_pid ?? "–"}, ${gpu.restarts} restarts`);
    paint(this.node, "--vgpus", String(this.rows.size));
  }
}
