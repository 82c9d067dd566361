// A GPU as its vGPUs' slices. Time runs to the right, SMs upward; below, the memory. In temporal mode every slice has all
// SMs for a part of the time; in spatial mode a part of the SMs, for a part of the time where they do not all fit.

import { el, keyed, paint, say, set } from "/static/dom.js";
import { bytes, short } from "/static/format.js";

class Slice {
  constructor(vgpuId) {
    this.label = el("b");
    this.figure = el("span");
    this.node = el("a", { class: "slice", href: `#${vgpuId}` }, this.label, this.figure);
  }

  lay({ left, bottom, width, height, part, hue, name, figure, title, frameWidth }) {
    paint(this.node, "left", `${left.toFixed(3)}%`);
    paint(this.node, "bottom", `${bottom.toFixed(3)}%`);
    paint(this.node, "width", `${width.toFixed(3)}%`);
    paint(this.node, "height", `${height.toFixed(3)}%`);
    paint(this.node, "--hue", String(hue));
    paint(this.node, "background-size", `${(100 * Math.min(1, part)).toFixed(1)}% 100%`);
    const px = (width / 100) * frameWidth;
    set(this.node, "data-flat", height < 45);
    set(this.node, "data-room", px < 52 || height < 18 ? "none" : px < 110 ? "name" : "all");
    say(this.label, name);
    say(this.figure, figure);
    set(this.node, "title", title);
    set(this.node, "aria-label", title);
  }
}

export class Picture {
  constructor() {
    this.slices = new Map();
    this.stores = new Map();
    this.free = el("div", { class: "free" }, (this.freeLabel = el("span")));
    this.freeMemory = el("div", { class: "free" }, (this.freeMemoryLabel = el("span")));
    this.area = el("div", { class: "area" });
    this.memory = el("div", { class: "memory" });
    this.node = el("div", { class: "picture" },
      el("div", { class: "axis up", "aria-hidden": "true" }, "SMs"),
      el("div", { class: "frame", role: "group", "aria-label": "Slices of time and SMs" }, this.free, this.area),
      el("div", { class: "axis", "aria-hidden": "true" }, "time →"),
      el("div", { class: "axis side", "aria-hidden": "true" }, "memory"),
      el("div", { class: "frame low", role: "group", "aria-label": "Slices of memory" }, this.freeMemory, this.memory));
    this.width = 800;
    this.resized = new ResizeObserver(([entry]) => (this.width = entry.contentRect.width));
    this.resized.observe(this.area.parentElement);
  }

  gone() {
    this.resized.disconnect();
  }

  draw(gpu, vgpus, hues) {
    const ids = vgpus.map((vgpu) => vgpu.vgpu_id);
    keyed(this.area, this.slices, ids, (id) => new Slice(id));
    keyed(this.memory, this.stores, ids, (id) => new Slice(id));
    if (gpu.mode === "spatial") this.spatial(gpu, vgpus, hues);
    else this.temporal(vgpus, hues);
    this.drawMemory(gpu, vgpus, hues);
  }

  temporal(vgpus, hues) {
    const promised = vgpus.reduce((sum, vgpu) => sum + vgpu.guarantee_ratio, 0);
    const scale = Math.max(1, promised); // overcommitted: shares have become weights
    let left = 0;
    for (const vgpu of vgpus) {
      const width = (100 * vgpu.guarantee_ratio) / scale;
      this.lay(vgpu, hues, { left, bottom: 0, width, height: 100 });
      left += width;
    }
    this.rest(left, 0, 100 - left, 100, 1 - promised, "of the time left");
  }

  spatial(gpu, vgpus, hues) {
    const wide = vgpus.reduce((sum, vgpu) => sum + vgpu.sm_percent_granted, 0);
    const scale = Math.max(100, wide); // more than fits at once: they take turns
    let bottom = 0;
    for (const vgpu of vgpus) {
      const height = (100 * vgpu.sm_percent_granted) / scale;
      this.lay(vgpu, hues, { left: 0, bottom, width: 100 * vgpu.guarantee_ratio, height });
      bottom += height;
    }
    this.rest(0, bottom, 100, 100 - bottom, 1 - wide / 100, "of the SMs left");
  }

  lay(vgpu, hues, place) {
    const name = vgpu.name ?? vgpu.vgpu_id;
    const width = vgpu.sm_percent_granted < 100 ? ` on ${short(vgpu.sm_percent_granted / 100)} of the SMs` : "";
    const promised = `${short(vgpu.guarantee_ratio)} of the time${width}`;
    this.slices.get(vgpu.vgpu_id).lay({
      ...place,
      frameWidth: this.width,
      part: vgpu.guarantee_ratio ? vgpu.held_ratio / vgpu.guarantee_ratio : 0,
      hue: hues.get(vgpu.vgpu_id),
      name,
      figure: vgpu.mode === "spatial" ? `${short(vgpu.sm_percent_granted / 100)} SMs` : short(vgpu.guarantee_ratio),
      title: `${name}: promised ${promised}, holds ${short(vgpu.held_ratio)}`,
    });
  }

  rest(left, bottom, width, height, ratio, of) {
    paint(this.free, "left", `${left.toFixed(3)}%`);
    paint(this.free, "bottom", `${bottom.toFixed(3)}%`);
    paint(this.free, "width", `${Math.max(0, width).toFixed(3)}%`);
    paint(this.free, "height", `${Math.max(0, height).toFixed(3)}%`);
    say(this.freeLabel, ratio > 0.04 && height > 22 ? `${short(ratio)} ${of}` : "");
  }

  drawMemory(gpu, vgpus, hues) {
    const promised = vgpus.reduce((sum, vgpu) => sum + vgpu.memory_limit_bytes, 0);
    const total = Math.max(gpu.total_memory_bytes, promised, 1);
    let left = 0;
    for (const vgpu of vgpus) {
      const width = (100 * vgpu.memory_limit_bytes) / total;
      const name = vgpu.name ?? vgpu.vgpu_id;
      const away = vgpu.memory_away_bytes ? `, ${bytes(vgpu.memory_away_bytes)} of it in the host's memory` : "";
      this.stores.get(vgpu.vgpu_id).lay({
        left, bottom: 0, width, height: 100, frameWidth: this.width,
        part: vgpu.memory_used_bytes / Math.max(1, vgpu.memory_limit_bytes),
        hue: hues.get(vgpu.vgpu_id), name, figure: bytes(vgpu.memory_limit_bytes),
        title: `${name}: ${bytes(vgpu.memory_used_bytes)} of ${bytes(vgpu.memory_limit_bytes)} used${away}`,
      });
      left += width;
    }
    paint(this.freeMemory, "left", `${left.toFixed(3)}%`);
    paint(this.freeMemory, "width", `${Math.max(0, 100 - left).toFixed(3)}%`);
    const rest = gpu.total_memory_bytes - promised;
    say(this.freeMemoryLabel, rest > 0.04 * total ? `${bytes(rest)} left` : "");
  }
}
