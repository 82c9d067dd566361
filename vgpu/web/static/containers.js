// The containers with a vGPU: a list beside the GPUs, their logs, and the start of what the configuration file lists.
// The section is there where the dashboard was started with --containers.

import { Dialog } from "/static/dialog.js";
import { $, el, keyed, paint, say, set, show } from "/static/dom.js";
import { bytes, bytesOf, percent, range, short } from "/static/format.js";
import { Log } from "/static/log.js";
import { ask } from "/static/node.js";
import { share } from "/static/view.js";

const LOOK_MS = 2000;
const RUNNING = "running";
const LIVING = new Set([RUNNING, "paused", "restarting"]);
// What the engine calls a state, as the page marks states.
const MARKS = { running: "running", paused: "suspended", created: "starting", restarting: "starting", removing: "removing", dead: "failed" };
const FIELDS = [{ key: "name", option: "--name", label: "Container name" }];

export class Containers {
  // `page`: snapshot(), hueOf(vgpu), told(words).
  constructor(page) {
    this.page = page;
    this.rows = new Map();
    this.list = [];
    this.looks = 0;
    this.looked = Promise.resolve();
    this.log = new Log();
    this.starting = new Dialog("begin", () => this.submitStart(), FIELDS);
    this.removal = new Dialog("discard", () => this.submitRemoval());
    $("begin-image").addEventListener("change", () => this.describe());
    $("containers-new").addEventListener("click", () => this.begin());
  }

  get shown() {
    return Boolean(this.engine);
  }

  // `engine`: its socket; "": the dashboard has none.
  told(engine) {
    if (engine === this.engine) return;
    this.engine = engine;
    show($("containers"), this.shown);
    show($("containers-key"), this.shown);
    say($("containers-engine"), engine.replace("unix://", ""));
    clearInterval(this.timer);
    if (!this.shown) return;
    this.look();
    this.timer = setInterval(() => document.hidden || this.looks || this.look(), LOOK_MS);
  }

  // Shows what there is at the call. A look that began before it may miss that, so this one comes after it.
  look() {
    this.looks += 1;
    this.looked = this.looked.then(() => this.read());
    return this.looked;
  }

  async read() {
    try {
      this.list = await ask("GET", "containers");
      this.failed = "";
    } catch (error) {
      this.failed = [error.message, error.hint].filter(Boolean).join(". ");
    }
    this.looks -= 1;
    this.draw();
  }

  // The names of the containers in this vGPU.
  of(vgpuId) {
    return this.list.filter((one) => one.vgpus.includes(vgpuId)).map((one) => one.name).join(", ");
  }

  draw() {
    if (!this.shown) return;
    say($("containers-failed"), this.failed);
    show($("containers-failed"), Boolean(this.failed));
    keyed($("containers-list"), this.rows, this.list.map((one) => one.id), (id) => new Row(id, this));
    for (const one of this.list) this.rows.get(one.id).draw(one, this.page);
    show($("containers-empty"), !this.list.length && !this.failed);
  }

  async act(row, verb) {
    set(row.node, "aria-busy", "true");
    try {
      await ask("POST", `containers/${row.id}/${verb}`);
    } catch (error) {
      this.page.told([error.message, error.hint].filter(Boolean).join(". "), "", true);
    } finally {
      set(row.node, "aria-busy", null);
      this.look();
    }
  }

  async begin() {
    let images;
    try {
      images = await ask("GET", "images");
    } catch (error) {
      this.page.told(error.message, "", true);
      return;
    }
    this.images = new Map(images.map((image) => [image.name, image]));
    $("begin-image").replaceChildren(...images.map(({ name }) => el("option", { value: name }, name)));
    $("begin-name").value = "";
    show($("begin-fields"), images.length > 0);
    show($("begin-none"), !images.length);
    show(this.starting.go, images.length > 0);
    this.describe();
    this.starting.open();
    if (images.length) $("begin-image").focus();
  }

  describe() {
    const image = this.images.get($("begin-image").value);
    const size = image && [`${short(image.sm_percent / 100)} of a GPU`, image.memory_bytes ? bytes(image.memory_bytes) : "memory in the same part", image.mode ? `${image.mode} mode` : ""];
    say($("begin-lead"), image ? `Its vGPU: ${size.filter(Boolean).join(", ")}. It goes with the container.` : "");
    say($("begin-what"), image ? [image.image, ...image.command].join(" ") : "");
  }

  async submitStart() {
    const name = $("begin-name").value.trim();
    const made = await ask("POST", "containers", { image: $("begin-image").value, ...(name ? { name } : {}) });
    this.page.told(`${made.name} runs in ${made.vgpus.join(", ")}`);
    await this.look();
    return this.rows.get(made.id)?.logs;
  }

  remove(container) {
    this.removed = container;
    say($("discard-title"), `Remove ${container.name}`);
    say($("discard-lead"), `${LIVING.has(container.state) ? "It runs: its programs are killed. " : ""}Its files and its log are deleted. A vGPU that was made for it goes, too.`);
    this.removal.open();
  }

  async submitRemoval() {
    const { id, name, state } = this.removed;
    await ask("DELETE", `containers/${id}?force=${LIVING.has(state)}`);
    this.page.told(`${name} is removed`);
    this.look();
  }
}

class Row {
  constructor(id, all) {
    this.id = id;
    const button = (label, onclick, kind = "quiet") => el("button", { type: "button", class: kind, onclick }, label);
    this.name = el("b");
    this.what = el("span", { class: "by" });
    this.state = el("span", { class: "state" });
    this.vgpus = el("span", { class: "in" });
    this.swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    this.share = el("b");
    this.promised = el("span");
    this.memory = el("span");
    this.logs = button("Log", () => all.log.open(this.container));
    this.turn = button("Stop", () => all.act(this, this.container.state === RUNNING ? "stop" : "start"));
    this.away = button("Remove…", () => all.remove(this.container), "quiet danger");
    this.node = el("li", { class: "container" }, this.swatch,
      el("span", { class: "who" }, this.name, this.what), this.state, this.vgpus,
      el("span", { class: "figures" }, this.share, this.promised), this.memory,
      el("span", { class: "actions" }, this.logs, this.turn, this.away));
  }

  draw(container, page) {
    this.container = container;
    const vgpus = page.snapshot()?.vgpus.filter((vgpu) => container.vgpus.includes(vgpu.vgpu_id)) ?? [];
    const [vgpu] = vgpus;
    say(this.name, container.name);
    say(this.what, [container.image, container.command].filter(Boolean).join(" · "));
    set(this.name, "title", container.name);
    set(this.what, "title", `${container.image}\n${container.command}\n${container.id.slice(0, 12)}`);
    say(this.state, container.state);
    set(this.state, "data-state", MARKS[container.state] ?? "idle");
    set(this.state, "title", container.status);
    const links = container.vgpus.join(" ") + vgpus.map((one) => one.name).join(" ");
    if (this.vgpus.said !== links) {
      this.vgpus.said = links;
      const named = container.vgpus.map((id) => [id, vgpus.find((one) => one.vgpu_id === id)]);
      this.vgpus.replaceChildren(...named.map(([id, one]) => (one ? el("a", { href: `#${id}`, title: id }, `in ${one.name ?? id}`) : el("span", { title: id }, "vGPU gone"))));
    }
    paint(this.node, "--hue", String(vgpu ? page.hueOf(vgpu) : 0));
    set(this.node, "data-lost", !vgpu);
    say(this.share, vgpu ? percent(share(vgpu)) : "");
    say(this.promised, vgpu ? ` of ${range(vgpu.guarantee_ratio, vgpu.limit_ratio)}` : "");
    say(this.memory, vgpu ? bytesOf(vgpu.memory_used_bytes, vgpu.memory_limit_bytes) : "");
    say(this.turn, container.state === RUNNING ? "Stop" : "Start");
    for (const [button, verb] of [[this.logs, "Log of"], [this.turn, this.turn.said], [this.away, "Remove"]]) set(button, "aria-label", `${verb} ${container.name}`);
  }
}
