// What the node advises is a command inside a sentence: here it becomes a button beside the sentence.

import { FIELDS } from "/static/dialogs.js";
import { el } from "/static/dom.js";

const COMMAND = /(?:: )?vgpuctl (set|gpu set|suspend|resume|rm|migrate) (\S+)((?: --[\w-]+(?: (?!--)[^\s;,.]+(?:\.\d+)?)?)*)/g;

// `text` as [words, buttons]. `page`: as of main.js; `vgpu`: the one that it is about.
export function advised(text, page, vgpu) {
  const buttons = [];
  const words = text.replace(COMMAND, (command, verb, ref, rest) => {
    const made = button(verb, ref, options(rest), page, vgpu);
    if (!made) return command;
    buttons.push(made);
    return "";
  });
  return [words.trim(), buttons];
}

function options(rest) {
  return [...rest.matchAll(/(--[\w-]+)(?: (?!--)(\S+))?/g)].map(([, option, value]) => [option, value ?? true]);
}

function button(verb, ref, given, page, vgpu) {
  const make = (label, onclick) => el("button", { type: "button", class: "advised", onclick }, label);
  if (verb === "gpu set") {
    const mode = given.find(([option]) => option === "--mode")?.[1];
    const gpu = () => page.snapshot().gpus.find((one) => String(one.index) === ref);
    return mode && gpu() ? make(`Change GPU ${ref} to ${mode} mode…`, () => page.sharing.open(gpu(), { mode })) : null;
  }
  if (ref !== vgpu.vgpu_id && ref !== vgpu.name) return null;
  if (verb === "set") {
    const wanted = given.map(([option, value]) => [FIELDS.find((field) => field.option === option), value]).filter(([field]) => field);
    if (!wanted.length || wanted.length < given.length) return null;
    const words = wanted.map(([field, value]) => (field.tick ? field.label : `${field.label.toLowerCase()} ${value}${field.key === "sm_percent" ? " %" : ""}`));
    return make(`Resize to ${words.join(" and ")}…`, () => page.dialogs.resize(vgpu, Object.fromEntries(wanted.map(([field, value]) => [field.key, value]))));
  }
  if (given.length) return null;
  if (verb === "suspend" || verb === "resume") {
    const made = make(verb === "suspend" ? "Suspend" : "Resume", () => page.act(made, "POST", `vgpus/${vgpu.vgpu_id}/${verb}`));
    return made;
  }
  if (verb === "rm") return make("Remove…", () => page.dialogs.remove(vgpu));
  return make("Migrate…", () => page.dialogs.migrate(vgpu));
}
