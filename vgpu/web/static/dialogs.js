// Making, resizing, moving and removing vGPUs. The node checks and refuses; its words are shown, and nothing that was
// typed is lost.

import { Dialog, Wrong } from "/static/dialog.js";
import { $, el, say, show } from "/static/dom.js";
import { bytes, quoted, short, typed, typedDuration } from "/static/format.js";
import { ask } from "/static/node.js";

// `key`: the field of VgpuSpec and VgpuChanges; `option`: of vgpuctl; `of`: how it is typed, from a specification.
// `needed`: a new vGPU must have it. Labels and units are for people without the words of the command line.
export const FIELDS = [
  { key: "sm_percent", option: "--sm", label: "Compute", unit: "% of the GPU", example: "for example 30", main: true, needed: true,
    of: (spec) => (spec.sm_percent == null ? "" : String(spec.sm_percent)) },
  { key: "memory_bytes", option: "--mem", label: "Memory", unit: "such as 8G", example: "default: the same part as compute", main: true, of: (spec) => size(spec.memory_bytes) },
  { key: "name", option: "--name", label: "Name", unit: "optional", example: "for example training", main: true, of: (spec) => spec.name ?? "" },
  { key: "gpu", option: "--gpu", label: "GPU", choices: [], main: true, fixed: true },
  { key: "quota_request_percent", option: "--quota-request", label: "Guaranteed time", unit: "%", example: "default: the time limit", of: (spec) => number(spec.quota_request_percent) },
  { key: "quota_limit_percent", option: "--quota-limit", label: "Time limit", unit: "%", example: "default: 100", of: (spec) => number(spec.quota_limit_percent) },
  { key: "memory_limit_bytes", option: "--mem-limit", label: "Burst memory limit", unit: "while the GPU has room, such as 16G", example: "default: the memory above", of: (spec) => size(spec.memory_limit_bytes) },
  { key: "process_memory_bytes", option: "--mem-per-process", label: "Memory per program", unit: "at most, such as 2G", example: "default: all of it", of: (spec) => size(spec.process_memory_bytes) },
  { key: "priority", option: "--priority", label: "Priority", choices: ["normal", "high", "low"], of: (spec) => spec.priority },
  { key: "ttl_ns", option: "--ttl", label: "Remove after", unit: "such as 8h", example: "default: never", of: (spec) => time(spec.ttl_ns) },
  { key: "idle_suspend_ns", option: "--idle-suspend", label: "Suspend when idle for", unit: "such as 10m", example: "default: never", of: (spec) => time(spec.idle_suspend_ns) },
  { key: "slo", option: "--slo", label: "Latency targets", unit: "such as tpot=30ms,ttft=500ms", example: "default: none", of: (spec) => spec.slo ?? "" },
  { key: "on_server_loss", option: "--on-server-loss", label: "If the server is down", choices: ["block", "error", "run"], words: ["programs wait", "programs fail", "programs run without a limit"], of: (spec) => spec.on_server_loss },
  { key: "oversubscribe", option: "--oversubscribe", label: "Memory beyond the card's", choices: ["", "swap", "managed"], words: ["no", "swap: a vGPU moves to host memory", "managed: pages move to host memory"], fixed: true },
  { key: "group", option: "--group", label: "Runs at the same time as", unit: "the name of a gang", example: "default: no other vGPU", fixed: true },
  { key: "share_group", option: "--share-group", label: "Shared with", unit: "a Unix group", example: "default: the owner alone", fixed: true },
  { key: "burst", option: "--burst", label: "Use idle GPU time beyond the share", tick: true, of: (spec) => spec.burst },
  { key: "overcommit", option: "--overcommit", label: "Allow overcommit: shares that do not fit become weights", tick: true, of: (spec) => spec.overcommit },
];

const size = (value) => (value == null ? "" : typed(value));
const number = (value) => (value == null ? "" : String(value));
const time = (value) => (value ? typedDuration(value) : "");

export class Dialogs {
  // `page`: snapshot(), told(words), copy(text).
  constructor(page) {
    this.page = page;
    this.edit = new Dialog("edit", () => this.submit(), FIELDS);
    this.removal = new Dialog("remove", () => this.submitRemoval());
    this.moving = new Dialog("move", () => this.submitMove());
    $("edit").addEventListener("input", () => this.preview());
    $("edit-copy").addEventListener("click", () => page.copy($("edit-command").textContent));
  }

  // `index`: of the GPU that is chosen first.
  create(index) {
    const gpus = this.page.snapshot()?.gpus ?? [];
    this.vgpu = null;
    say($("edit-title"), "New vGPU");
    say(this.edit.go, "Create");
    this.build(FIELDS, {}, gpus);
    say($("edit-lead"), gpus.map(room).join("  ·  "));
    if (index !== undefined && this.inputs.has("gpu")) this.inputs.get("gpu").value = String(index);
    this.preview();
    this.edit.open();
    this.inputs.get("sm_percent").focus();
  }

  // `wanted`: what the page advises, by key; it is filled in, and the user decides.
  resize(vgpu, wanted = {}) {
    this.vgpu = vgpu;
    say($("edit-title"), `Resize ${vgpu.name ?? vgpu.vgpu_id}`);
    say(this.edit.go, "Resize");
    this.build(FIELDS.filter((field) => !field.fixed), vgpu.spec, []);
    const gpu = this.page.snapshot()?.gpus.find((one) => one.index === vgpu.gpu_index);
    say($("edit-lead"), `${gpu ? `Beside it, ${room(gpu)}. ` : ""}The new size holds from the next turn on.`);
    for (const [key, value] of Object.entries(wanted)) {
      const input = this.inputs.get(key);
      if (input?.type === "checkbox") input.checked = value;
      else if (input) input.value = value;
    }
    this.preview();
    this.edit.open();
    if (Object.keys(wanted).length) this.edit.go.focus();
    else this.inputs.get("sm_percent").select();
  }

  build(fields, spec, gpus) {
    this.fields = fields;
    this.inputs = new Map();
    this.before = new Map();
    const made = { main: [], more: [] };
    for (const field of fields) {
      if (field.key === "gpu" && gpus.length < 2) continue;
      const choices = field.key === "gpu" ? ["auto", ...gpus.map((gpu) => String(gpu.index))] : field.choices;
      const value = this.vgpu ? field.of(spec) : field.tick ? false : choices?.[0] ?? "";
      const input = choices
        ? el("select", {}, ...choices.map((choice, i) => el("option", { value: choice }, field.words?.[i] ?? choice)))
        : el("input", field.tick ? { type: "checkbox" } : { type: "text", placeholder: field.example, autocomplete: "off", spellcheck: "false", inputmode: field.key === "sm_percent" ? "decimal" : null });
      const needed = Boolean(field.needed) && !this.vgpu;
      if (needed) input.setAttribute("aria-required", "true");
      input.name = field.key;
      input.id = `edit-${field.key}`;
      if (field.tick) input.checked = value;
      else input.value = value;
      this.inputs.set(field.key, input);
      this.before.set(field.key, value);
      made[field.main ? "main" : "more"].push(field.tick
        ? el("label", { class: "check" }, input, ` ${field.label}`)
        : el("div", { class: "field" }, el("label", { for: input.id }, field.label, needed ? el("b", { class: "needed", "aria-hidden": "true" }, " *") : "", field.unit ? el("small", {}, ` ${field.unit}`) : ""), input));
    }
    $("edit-fields").replaceChildren(...made.main);
    $("edit-more-fields").replaceChildren(...made.more);
    $("edit-more").open = false;
    show($("edit-marks"), !this.vgpu);
    this.edit.inputs = this.inputs;
    this.preview();
  }

  // What differs from what was there.
  changed() {
    const found = [];
    for (const field of this.fields) {
      const input = this.inputs.get(field.key);
      if (!input) continue;
      const value = field.tick ? input.checked : input.value.trim();
      if (value !== this.before.get(field.key)) found.push([field, value]);
    }
    return found;
  }

  preview() {
    const words = this.vgpu ? ["vgpuctl", "set", this.vgpu.name ?? this.vgpu.vgpu_id] : ["vgpuctl", "create"];
    for (const [field, value] of this.changed()) {
      if (field.tick) words.push(value ? field.option : field.option.replace("--", "--no-"));
      else if (value !== "") words.push(field.option, quoted(value));
    }
    say($("edit-command"), words.join(" "));
  }

  async submit() {
    const changes = this.changed().filter(([, value]) => value !== "");
    for (const { key, label, needed } of this.fields) {
      if (needed && !this.vgpu && !this.inputs.get(key).value.trim()) {
        throw new Wrong([[key, "type a number from 1 to 100"]], `${label}: type a number from 1 to 100`);
      }
    }
    const emptied = this.changed().find(([, value]) => value === "");
    if (this.vgpu && emptied) {
      const [field] = emptied;
      const why = `a limit can be replaced, not taken away${["idle_suspend_ns", "slo"].includes(field.key) ? "; type off" : ""}`;
      throw new Wrong([[field.key, why]], `${field.label}: ${why}`);
    }
    const body = Object.fromEntries(changes.filter(([field]) => field.key !== "gpu").map(([field, value]) => [field.key, value]));
    if (this.vgpu) {
      const vgpu = await ask("PATCH", `vgpus/${this.vgpu.vgpu_id}`, body);
      this.page.told(`${vgpu.name ?? vgpu.vgpu_id} is resized`);
      return;
    }
    const gpu = this.inputs.get("gpu")?.value ?? "auto";
    const vgpu = await ask("POST", `vgpus?gpu=${encodeURIComponent(gpu)}`, body);
    this.page.told(`${vgpu.name ?? vgpu.vgpu_id} is made: export VGPU_ID=${vgpu.vgpu_id}`, vgpu.vgpu_id);
  }

  remove(vgpu) {
    this.removed = vgpu;
    say($("remove-title"), `Remove ${vgpu.name ?? vgpu.vgpu_id}`);
    say($("remove-lead"), vgpu.processes ? `${vgpu.processes === 1 ? "A program runs" : `${vgpu.processes} programs run`} in it.` : "Its share and its memory are free for others then.");
    show($("remove-force-row"), vgpu.processes > 0);
    $("remove-force").checked = false;
    this.removal.open();
  }

  async submitRemoval() {
    const vgpu = this.removed;
    try {
      await ask("DELETE", `vgpus/${vgpu.vgpu_id}?force=${$("remove-force").checked}`);
    } catch (error) {
      if (error.code !== "in-use") throw error;
      show($("remove-force-row"), true);
      throw new Wrong([["force", "tick this to remove it now"]], named(error.message, vgpu));
    }
    this.page.told(`${vgpu.name ?? vgpu.vgpu_id} is removed`);
  }

  migrate(vgpu) {
    this.moved = vgpu;
    say($("move-title"), `Migrate ${vgpu.name ?? vgpu.vgpu_id}`);
    const others = this.page.snapshot().gpus.filter((gpu) => gpu.index !== vgpu.gpu_index);
    $("move-gpu").replaceChildren(...others.map((gpu) => el("option", { value: String(gpu.index) }, room(gpu).replace(" has", gpu.mode === "spatial" ? " (spatial mode) has" : " has"))));
    this.moving.open();
  }

  async submitMove() {
    const vgpu = await ask("POST", `vgpus/${this.moved.vgpu_id}/migrate?gpu=${$("move-gpu").value}`).catch((error) => {
      error.message = named(error.message, this.moved);
      error.fields = [["gpu", "it cannot move there"]];
      throw error;
    });
    this.page.told(`${vgpu.name ?? vgpu.vgpu_id} is on GPU ${vgpu.gpu_index}`);
  }
}

// What the node says of a vGPU, with its name.
function named(message, { vgpu_id: id, name }) {
  return name ? message.replace(id, `vGPU ${name}`) : message;
}

function room(gpu) {
  const time = Math.max(0, 1 - gpu.guaranteed_ratio);
  const memory = Math.max(0, gpu.total_memory_bytes - gpu.guaranteed_memory_bytes);
  return `GPU ${gpu.index} has ${short(time)} and ${bytes(memory)} left`;
}
