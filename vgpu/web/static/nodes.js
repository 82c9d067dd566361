// All nodes of `vgpuctl dashboard --nodes FILE`: their GPUs and vGPUs in one table for each node.

import { $, el, say } from "/static/dom.js";
import { ask } from "/static/node.js";

const AGAIN_MS = 2_000;
const GIB = 2 ** 30;

const percent = (ratio) => `${Math.round(100 * ratio)} %`;
const gib = (bytes) => `${Number((bytes / GIB).toPrecision(3))} GiB`;
const cell = (text, right) => el("td", right ? { class: "right" } : {}, text);

function table(heads, rows) {
  const head = el("tr", {}, ...heads.map(([text, right]) => el("th", { scope: "col", class: right ? "right" : false }, text)));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
}

const GPUS = [["GPU"], ["State"], ["Promised", true], ["Used", true], ["Memory", true], ["vGPUs", true]];
const VGPUS = [["vGPU"], ["Name"], ["GPU"], ["State"], ["Share", true], ["Used", true], ["Memory", true]];

function gpuRow(gpu) {
  const state = gpu.draining && gpu.state === "serving" ? "drained" : gpu.state;
  return el("tr", {}, cell(`${gpu.index} ${gpu.name}`), cell(state), cell(percent(gpu.guaranteed_ratio), true), cell(percent(gpu.busy_ratio), true),
    cell(`${gib(gpu.used_memory_bytes)} of ${gib(gpu.total_memory_bytes)}`, true), cell(String(gpu.vgpus), true));
}

function vgpuRow(vgpu) {
  return el("tr", {}, cell(vgpu.vgpu_id), cell(vgpu.name ?? ""), cell(String(vgpu.gpu_index)), cell(vgpu.state), cell(percent(vgpu.guarantee_ratio), true),
    cell(percent(vgpu.busy_ratio), true), cell(`${gib(vgpu.memory_used_bytes)} of ${gib(vgpu.memory_limit_bytes)}`, true));
}

function section({ name, error, snapshot }) {
  const head = el("header", {}, el("h2", {}, name));
  if (!snapshot) return el("section", { class: "gpu", "data-node": name }, head, el("p", { class: "remark" }, `It does not answer: ${error}`));
  const vgpus = snapshot.vgpus.length ? table(VGPUS, snapshot.vgpus.map(vgpuRow)) : el("p", { class: "empty" }, "No vGPU.");
  return el("section", { class: "gpu", "data-node": name }, head, table(GPUS, snapshot.gpus.map(gpuRow)), vgpus);
}

async function draw() {
  try {
    const nodes = await ask("GET", "nodes");
    $("nodes").replaceChildren(...nodes.map(section));
    const silent = nodes.filter((node) => !node.snapshot).length;
    say($("link-text"), silent ? `${nodes.length} nodes, ${silent} without an answer` : `${nodes.length} nodes`);
    document.body.dataset.link = "live";
  } catch (error) {
    say($("link-text"), error.message);
    document.body.dataset.link = "lost";
  }
  setTimeout(draw, AGAIN_MS);
}

draw();
