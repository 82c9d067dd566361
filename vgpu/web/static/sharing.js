// How a GPU is shared, as `vgpuctl gpu set` changes it. What is left as it is, or empty, is not asked for.

import { Dialog } from "/static/dialog.js";
import { $, say } from "/static/dom.js";
import { count, duration, quoted } from "/static/format.js";
import { ask } from "/static/node.js";

// `key`: the field of GpuChanges; `option`: of vgpuctl; `of`: how it is now, for an empty field.
const FIELDS = [
  { key: "mode", option: "--mode", label: "Mode" },
  { key: "period_ns", option: "--period", label: "Period", of: (gpu) => duration(gpu.period_ns) },
  { key: "window_ns", option: "--window", label: "Window", of: (gpu) => duration(gpu.window_ns) },
];

export class Sharing {
  // `page`: told(words), copy(text).
  constructor(page) {
    this.page = page;
    this.dialog = new Dialog("share", () => this.submit(), FIELDS);
    $("share").addEventListener("input", () => this.preview());
    $("share-copy").addEventListener("click", () => page.copy($("share-command").textContent));
  }

  // `wanted`: what the page advises.
  open(gpu, wanted = {}) {
    this.gpu = gpu;
    say($("share-title"), `How GPU ${gpu.index} is shared`);
    const runs = gpu.processes === 1 ? "A program runs on it, and the mode cannot change before it has ended."
      : gpu.processes ? `${count(gpu.processes, "program")} run on it, and the mode cannot change before they have ended.` : "No program runs on it: the mode can change, too.";
    say($("share-lead"), `${runs} Period and window take effect with the next token.`);
    for (const { key, of } of FIELDS) {
      const input = $(`share-${key}`);
      if (of) input.placeholder = `${of(gpu)} now`;
      input.value = wanted[key] ?? (of ? "" : gpu[key]);
    }
    this.preview();
    this.dialog.open();
  }

  changed() {
    return FIELDS.map((field) => [field, $(`share-${field.key}`).value.trim()]).filter(([{ key }, value]) => value !== "" && value !== this.gpu[key]);
  }

  preview() {
    const words = this.changed().flatMap(([{ option }, value]) => [option, quoted(value)]);
    say($("share-command"), ["vgpuctl", "gpu", "set", String(this.gpu.index), ...words].join(" "));
  }

  async submit() {
    const changes = this.changed().map(([{ key }, value]) => [key, value]);
    if (!changes.length) throw new Error("nothing is to be changed yet");
    const gpu = await ask("PATCH", `gpus/${this.gpu.index}`, Object.fromEntries(changes));
    this.page.told(`GPU ${gpu.index}: ${gpu.mode} mode, rounds of ${duration(gpu.period_ns)}, window of ${duration(gpu.window_ns)}`);
  }
}
