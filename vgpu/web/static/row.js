// One vGPU: a line of live figures, and its details when it is opened.

import { el, paint, say, set, show } from "/static/dom.js";
import { advised } from "/static/advice.js";
import { bytes, bytesOf, clock, count, duration, ends, many, OPEN, percent, range, short, tokenRate } from "/static/format.js";
import { ask } from "/static/node.js";
import { Spark } from "/static/spark.js";
import { share, state } from "/static/view.js";

const LOOK_MS = 2000;

export class Row {
  constructor(vgpuId, page) {
    this.id = vgpuId;
    this.page = page;
    this.spark = new Spark();
    this.name = el("b", {}, (this.head = el("span")), (this.tail = el("span")));
    this.code = el("span", { class: "by" });
    this.state = el("span", { class: "state" });
    this.rate = el("b");
    this.held = el("b");
    this.promised = el("span");
    this.bullet = el("div", { class: "bullet" }, (this.tick = el("i", { class: "tick" })));
    this.memory = el("span");
    this.meter = el("div", { class: "bullet" }, (this.memoryTick = el("i", { class: "tick" })));
    this.waiting = el("span");
    this.programs = el("span");
    this.toggle = el("button", {
      type: "button", class: "toggle", "aria-expanded": "false", "aria-controls": `${vgpuId}-details`, onclick: () => this.open(!this.opened),
    }, el("span", { class: "swatch", "aria-hidden": "true" }), el("span", { class: "who" }, this.name, this.code), this.state);
    this.resize = el("button", { type: "button", class: "quiet", onclick: () => page.dialogs.resize(this.vgpu) }, "Resize");
    this.details = el("div", { class: "details", id: `${vgpuId}-details`, hidden: true });
    this.node = el("li", { class: "vgpu", id: vgpuId },
      el("div", { class: "line-of" }, this.toggle,
        cell("tokens/s", "rate", this.rate, this.spark.node),
        cell("share", "share", el("span", { class: "figures" }, this.held, this.promised), this.bullet),
        cell("memory", "mem", el("span", { class: "figures" }, this.memory), this.meter),
        cell("waiting", "wait", this.waiting),
        cell("programs", "procs", this.programs),
        this.resize),
      this.details);
    this.onScreen = true;
  }

  draw(vgpu, hue, nowS, gpu) {
    this.vgpu = vgpu;
    const added = this.spark.add(nowS, vgpu.tokens_per_second);
    if (!this.onScreen) return;
    paint(this.node, "--hue", String(hue));
    const name = vgpu.name ?? vgpu.vgpu_id;
    const [head, tail] = ends(name);
    say(this.head, head);
    say(this.tail, tail);
    const container = this.page.containerOf?.(vgpu);
    const by = [this.page.userOf?.(vgpu), container && (container === name ? "in a container" : `container ${container}`), vgpu.processes ? this.page.commandOf?.(vgpu) : ""].filter(Boolean).join(" · ");
    say(this.code, by);
    set(this.toggle, "title", [name, vgpu.name ? vgpu.vgpu_id : "", by].filter(Boolean).join("\n"));
    say(this.state, state(vgpu));
    set(this.state, "data-state", vgpu.state);
    set(this.state, "title", vgpu.reason || null);
    say(this.rate, tokenRate(vgpu));
    set(this.rate, "title", vgpu.open_ended && OPEN);
    if (added) this.spark.draw(nowS);
    this.drawShare(vgpu);
    say(this.memory, bytesOf(vgpu.memory_used_bytes, vgpu.memory_limit_bytes));
    const all = Math.max(1, gpu?.total_memory_bytes ?? 0, vgpu.memory_limit_bytes);
    paint(this.meter, "background-size", parts(vgpu.memory_used_bytes / all, vgpu.memory_limit_bytes / all));
    paint(this.memoryTick, "left", place(vgpu.memory_limit_bytes / all));
    set(this.meter, "title", `${bytesOf(vgpu.memory_used_bytes, vgpu.memory_limit_bytes)}; the whole bar: ${bytes(all)}`);
    set(this.meter, "data-full", vgpu.memory_used_bytes > 0.95 * vgpu.memory_limit_bytes);
    say(this.waiting, vgpu.waiting_ns ? duration(vgpu.waiting_ns) : vgpu.state === "waiting" ? "yes" : "no");
    set(this.waiting, "data-quiet", !vgpu.waiting_ns && vgpu.state !== "waiting");
    say(this.programs, String(vgpu.processes));
    set(this.programs, "data-quiet", !vgpu.processes);
    set(this.node, "data-warns", vgpu.warnings.length > 0 || vgpu.state === "failed");
    set(this.resize, "aria-label", `Resize ${vgpu.name ?? vgpu.vgpu_id}`);
  }

  drawShare(vgpu) {
    // A token without an end takes nothing from other vGPUs: what counts is the GPU time used under it.
    const held = share(vgpu);
    say(this.held, percent(held));
    say(this.promised, ` of ${range(vgpu.guarantee_ratio, vgpu.limit_ratio)}`);
    paint(this.bullet, "background-size", parts(held, vgpu.limit_ratio));
    paint(this.tick, "left", place(vgpu.guarantee_ratio));
    set(this.bullet, "title", `holds ${percent(vgpu.held_ratio)}, busy ${percent(vgpu.busy_ratio)}, guaranteed ${short(vgpu.guarantee_ratio)}, at most ${short(vgpu.limit_ratio)}; the whole bar: the GPU`);
  }

  open(opened) {
    this.opened = opened;
    set(this.toggle, "aria-expanded", String(opened));
    show(this.details, opened);
    clearInterval(this.timer);
    if (!opened) return;
    if (!this.facts) this.build();
    this.look();
    this.timer = setInterval(() => document.hidden || this.look(), LOOK_MS);
  }

  gone() {
    clearInterval(this.timer);
    this.page.rowGone(this);
  }

  build() {
    const vgpu = () => this.vgpu;
    const { dialogs, act, copy } = this.page;
    const button = (label, onclick, kind = "quiet") => el("button", { type: "button", class: kind, onclick }, label);
    this.suspend = button("Suspend", () => act(this.suspend, "POST", `vgpus/${this.id}/${asleep(this.vgpu) ? "resume" : "suspend"}`));
    this.move = button("Migrate…", () => dialogs.migrate(vgpu()));
    this.facts = el("dl", { class: "facts" });
    this.remarks = el("ul", { class: "remarks" });
    this.processes = el("tbody");
    this.noProcess = el("p", { class: "empty" }, "No program runs in it. Type ", el("code", {}, `vgpuctl exec ${this.id} -- python train.py`));
    this.table = el("table", {}, el("thead", {}, el("tr", {}, ...["pid", "program", "state", "memory", "GPU time", "launches", "waits"].map((word) => el("th", { scope: "col" }, word)))), this.processes);
    this.details.append(
      el("div", { class: "actions" }, this.suspend, this.move,
        button("Copy export", () => copy(exported(this.vgpu))), button("Copy exec", () => copy(`vgpuctl exec ${this.id} -- `)),
        button("Remove…", () => dialogs.remove(vgpu()), "quiet danger")),
      this.remarks, this.facts, el("div", { class: "scroll" }, this.table), this.noProcess);
  }

  async look() {
    let detail;
    try {
      detail = await ask("GET", `vgpus/${this.id}`);
    } catch (error) {
      this.remarks.replaceChildren(el("li", {}, error.message));
      return;
    }
    const vgpu = detail.vgpu;
    say(this.suspend, asleep(vgpu) ? "Resume" : "Suspend");
    show(this.move, this.page.gpuCount() > 1);
    const remarks = [...vgpu.warnings, ...detail.notes, ...(detail.advice?.text ? [detail.advice.text] : [])];
    if (vgpu.reason) remarks.unshift(vgpu.reason);
    const told = remarks.join("\n");
    if (this.remarks.said !== told) {
      this.remarks.said = told;
      this.remarks.replaceChildren(...remarks.map((text) => {
        const [words, buttons] = advised(text, this.page, vgpu);
        return el("li", {}, words, ...buttons);
      }));
    }
    this.tell(vgpu);
    show(this.table, detail.processes.length > 0);
    show(this.noProcess, detail.processes.length === 0);
    this.list(detail.processes);
  }

  tell(vgpu) {
    const facts = {
      id: vgpu.vgpu_id,
      owner: `${this.page.userOf(vgpu)} (uid ${vgpu.owner_uid})${vgpu.spec.share_group ? `, group ${vgpu.spec.share_group}` : ""}`,
      created: `${clock(vgpu.created_unix_s)}${vgpu.expires_unix_s ? `, removed at ${clock(vgpu.expires_unix_s)}` : ""}`,
      priority: vgpu.spec.priority,
      tokens: many(vgpu.tokens),
      "GPU time": duration(vgpu.busy_ns),
      launches: many(vgpu.launches),
      "memory peak": bytes(vgpu.memory_peak_bytes),
      refused: vgpu.memory_refusals ? `${count(vgpu.memory_refusals, "allocation")}, the last of ${bytes(vgpu.memory_refused_bytes)}` : "no allocation",
      swaps: vgpu.swaps_out || vgpu.swaps_in ? `${vgpu.swaps_out} out, ${vgpu.swaps_in} in` : "none",
    };
    this.values ??= {};
    for (const [name, value] of Object.entries(facts)) {
      if (!this.values[name]) this.facts.append(el("div", {}, el("dt", {}, name), (this.values[name] = el("dd"))));
      say(this.values[name], value);
    }
  }

  list(processes) {
    while (this.processes.rows.length > processes.length) this.processes.deleteRow(-1);
    processes.forEach((process, i) => {
      const row = this.processes.rows[i] ?? this.processes.insertRow();
      const state = !process.alive ? "died" : asleep(this.vgpu) ? this.vgpu.state : process.has_work ? "running" : process.wants ? "waiting" : "idle";
      [String(process.pid), process.command, state, bytes(process.memory_bytes + process.memory_implicit_bytes), duration(process.busy_ns),
        many(process.launches), process.gate_waits ? `${many(process.gate_waits)}, ${duration(process.gate_wait_ns)}` : "none"]
        .forEach((text, j) => say(row.cells[j] ?? row.insertCell(), text));
      set(row.cells[1], "title", process.command);
    });
  }
}

// Of the whole GPU: what is held, and what may be.
const part = (ratio) => `${(100 * Math.min(1, ratio)).toFixed(1)}% 100%`;
const parts = (held, limit) => `${part(held)}, ${part(limit)}`;
const place = (ratio) => `calc(${(100 * Math.min(1, ratio)).toFixed(1)}% - 1px)`;

const cell = (label, kind, ...inside) => el("div", { class: `cell ${kind}` }, el("span", { class: "label" }, label), ...inside);

export const asleep = (vgpu) => vgpu.state === "suspended" || vgpu.state === "idle-suspended";

export const exported = (vgpu) => `export VGPU_ID=${vgpu.vgpu_id}`;
