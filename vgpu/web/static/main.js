// The page: what the node says goes to its parts, once per frame; keys and buttons.

import { Containers } from "/static/containers.js";
import { Dialogs } from "/static/dialogs.js";
import { hueOf } from "/static/colour.js";
import { $, el, keyed, say, set, show } from "/static/dom.js";
import { EventsList } from "/static/events.js";
import { clock } from "/static/format.js";
import { Gpu } from "/static/gpu.js";
import { Node, ask } from "/static/node.js";
import { asleep } from "/static/row.js";
import { Sharing } from "/static/sharing.js";
import { SPAN_S } from "/static/spark.js";
import { Usage } from "/static/usage.js";
import { View } from "/static/view.js";

const SHOWN_MS = 6000;
const LABELS_MS = 10_000;
const THEMES = ["system", "light", "dark"];
const SIGNS = { system: "◐", light: "☀", dark: "☾" };

const gpus = new Map();
const dirty = new Set();
let labels = { host: "", users: {}, commands: {}, engine: "" };
let labelled = { atMs: -LABELS_MS, of: "" };
let past = null;
let toasting;

const page = {
  snapshot: () => node.snapshot,
  gpuCount: () => node.snapshot?.gpus.length ?? 0,
  pastOf,
  userOf: (vgpu) => labels.users[vgpu.owner_uid] ?? String(vgpu.owner_uid),
  commandOf: (vgpu) => labels.commands[vgpu.vgpu_id] ?? "",
  containerOf: (vgpu) => containers.of(vgpu.vgpu_id),
  hueOf: (vgpu) => hueOf(gpus.get(vgpu.gpu_index)?.places.get(vgpu.vgpu_id) ?? 0),
  rowGone: (row) => gpus.forEach((gpu) => gpu.seen.unobserve(row.node)),
  copy,
  act,
  told,
};
const dialogs = (page.dialogs = new Dialogs(page));
page.sharing = new Sharing(page);
page.view = new View(page.userOf, () => mark("filter"));
const containers = new Containers(page);
const events = new EventsList();
const usage = new Usage();
const node = new Node(mark);

function mark(what) {
  if (!dirty.size) requestAnimationFrame(draw);
  dirty.add(what);
}

function draw() {
  performance.mark("draw");
  if (dirty.has("link")) drawLink();
  if (dirty.has("events")) events.draw(node.events, (id) => node.snapshot?.vgpus.find((vgpu) => vgpu.vgpu_id === id)?.name ?? id, labels.users);
  if (dirty.has("snapshot") || dirty.has("filter")) drawSnapshot();
  dirty.clear();
  performance.measure("draw", "draw");
}

function drawLink() {
  const { connected, error, hint, since_unix_s: since, software } = node.link;
  set(document.body, "data-link", connected ? "live" : "lost");
  say($("link-text"), connected ? "live" : `stale since ${clock(since)}`);
  show($("banner"), !connected);
  say($("banner-text"), error ? `${error}${error.endsWith(".") ? "" : "."}` : "");
  say($("banner-hint"), hint.replace("start one with: ", "").replace("start it with: ", "") || "vgpuctl status");
  if (software) say($("software"), `st-vgpu ${software}`);
}

function drawSnapshot() {
  const snapshot = node.snapshot;
  if (!snapshot) return;
  label(snapshot);
  page.view.told(snapshot.vgpus);
  const fits = filter();
  const first = gpus.size === 0;
  keyed($("gpus"), gpus, snapshot.gpus.map((gpu) => gpu.index), (index) => new Gpu(index, page));
  for (const gpu of snapshot.gpus) {
    const own = snapshot.vgpus.filter((vgpu) => vgpu.gpu_index === gpu.index);
    gpus.get(gpu.index).draw(gpu, own, fits, snapshot.at_unix_s);
  }
  if (first && !page.view.compact) gpus.get(snapshot.gpus.find((gpu) => gpu.vgpus > 0)?.index)?.showTimeline(true);
  containers.draw();
  const simulated = snapshot.gpus.some((gpu) => gpu.simulated);
  show($("node-is"), simulated);
  say(document.querySelector("title"), `${labels.host ? `${labels.host} · ` : ""}${simulated ? "simulated · " : ""}vGPU: ${snapshot.vgpus.length} on ${snapshot.gpus.length === 1 ? "1 GPU" : `${snapshot.gpus.length} GPUs`}`);
}

// Names of users and commands of programs, from the dashboard's machine: when the programs change, and now and then.
async function label(snapshot) {
  const of = snapshot.vgpus.map((vgpu) => `${vgpu.vgpu_id} ${vgpu.processes}`).join();
  if (of === labelled.of && performance.now() - labelled.atMs < LABELS_MS) return;
  labelled = { atMs: performance.now(), of };
  try {
    const users = JSON.stringify(labels.users);
    labels = await ask("GET", "labels");
    if (JSON.stringify(labels.users) !== users) {
      events.forget();
      mark("events");
    }
  } catch {
    return; // the page says that the node does not answer
  }
  say($("host"), labels.host);
  show($("host"), Boolean(labels.host));
  containers.told(labels.engine);
  mark("filter");
}

function filter() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  return (vgpu) => {
    const text = `${vgpu.name ?? ""} ${vgpu.vgpu_id} ${vgpu.state} ${page.userOf(vgpu)} uid ${vgpu.owner_uid} ${page.commandOf(vgpu)} ${page.containerOf(vgpu)} gpu ${vgpu.gpu_index} ${vgpu.spec.priority}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
}

function pastOf(kind, key) {
  const values = past?.[kind][key]?.tokens_per_second ?? [];
  return values.map((value, i) => [past.at_unix_s[i], value]).filter(([, value]) => value !== null);
}

// --- what is done

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without HTTPS a browser lends its clipboard to pages of this machine only.
    const area = el("textarea", { class: "sr" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  told(`Copied: ${text}`);
}

async function act(button, method, path) {
  set(button, "aria-busy", "true");
  try {
    await ask(method, path);
  } catch (error) {
    told(error.hint ? `${error.message}. ${error.hint}` : error.message, "", true);
  } finally {
    set(button, "aria-busy", null);
  }
}

function told(words, vgpuId = "", bad = false) {
  const toast = $("toast");
  toast.textContent = words;
  set(toast, "data-bad", bad);
  set(toast, "data-shown", true);
  clearTimeout(toasting);
  toasting = setTimeout(() => set(toast, "data-shown", null), SHOWN_MS);
}

// --- keys and buttons

function theme(chosen) {
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  try {
    if (chosen === "system") localStorage.removeItem("vgpu-theme");
    else localStorage.setItem("vgpu-theme", chosen);
  } catch {
    // Then it is chosen for this page alone.
  }
  say($("theme"), SIGNS[chosen]);
  set($("theme"), "aria-label", `Colours: ${chosen === "system" ? "as the system" : chosen}`);
  set($("theme"), "title", `Colours: ${chosen === "system" ? "as the system" : chosen}`);
}

const nextTheme = () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length]);

function step(by) {
  const toggles = [...document.querySelectorAll(".vgpu .toggle")];
  const at = toggles.indexOf(document.activeElement);
  toggles[at < 0 ? (by > 0 ? 0 : toggles.length - 1) : Math.max(0, Math.min(toggles.length - 1, at + by))]?.focus();
}

function focused() {
  const id = document.activeElement?.closest(".vgpu")?.id;
  return node.snapshot?.vgpus.find((vgpu) => vgpu.vgpu_id === id);
}

function suspend(vgpu) {
  const verb = asleep(vgpu) ? "resume" : "suspend";
  act(document.activeElement, "POST", `vgpus/${vgpu.vgpu_id}/${verb}`);
}

function migrate(vgpu) {
  if (page.gpuCount() > 1) dialogs.migrate(vgpu);
  else told("This node has one GPU: there is no other to migrate to", "", true);
}

function chosen(name, words) {
  page.view.next(name);
  told(`${words} ${page.view[name]}`);
}

function showTimelines() {
  const shown = [...gpus.values()].some((gpu) => gpu.timelineShown);
  gpus.forEach((gpu) => gpu.showTimeline(!shown && gpu.rows.size > 0));
}

const KEYS = {
  n: () => dialogs.create(),
  "/": () => $("filter").focus(),
  "?": () => $("keys").showModal(),
  t: nextTheme,
  j: () => step(1),
  k: () => step(-1),
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  r: () => focused() && dialogs.resize(focused()),
  u: () => focused() && suspend(focused()),
  m: () => focused() && migrate(focused()),
  x: () => focused() && dialogs.remove(focused()),
  s: () => chosen("order", "Sorted by"),
  g: () => chosen("group", "Grouped by"),
  c: () => page.view.toggle(),
  d: () => containers.shown && containers.begin(),
  l: () => showTimelines(),
  h: () => usage.toggle(),
  p: () => gpus.forEach((gpu) => gpu.timeline.pause()),
};

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape" && event.target.id === "filter") {
      event.target.value = "";
      event.target.dispatchEvent(new Event("input"));
      event.target.blur();
    }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const meant = KEYS[event.key];
  if (!meant) return;
  event.preventDefault();
  meant();
});

$("filter").addEventListener("input", () => mark("filter"));
$("new").addEventListener("click", () => dialogs.create());
$("help").addEventListener("click", () => $("keys").showModal());
$("theme").addEventListener("click", nextTheme);
document.addEventListener("click", (event) => {
  const id = event.target.closest?.('a[href^="#vgpu-"]')?.getAttribute("href").slice(1);
  const toggle = id && document.getElementById(id)?.querySelector(".toggle");
  if (!toggle) return;
  event.preventDefault();
  toggle.scrollIntoView({ block: "center" });
  toggle.focus();
});

theme(document.documentElement.dataset.theme ?? "system");
try {
  past = await ask("GET", `history?seconds=${SPAN_S}`);
} catch {
  // Charts begin now.
}
node.open();
