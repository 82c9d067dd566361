// How rows are shown: their order, their groups, compact or full. The browser keeps the choice.

import { $, el, say, set } from "/static/dom.js";

export const MANY = 12; // of more vGPUs, rows are compact unless chosen otherwise

const text = (of) => (a, b) => of(a).localeCompare(of(b), "en", { numeric: true });
const most = (of) => (a, b) => of(b) - of(a);
const named = (vgpu) => vgpu.name ?? vgpu.vgpu_id;
export const share = (vgpu) => (vgpu.open_ended || vgpu.shares ? vgpu.busy_ratio : vgpu.held_ratio);
export const state = (vgpu) => (vgpu.throttled && vgpu.state === "waiting" ? "at limit" : vgpu.state);

export class View {
  // `changed()` is called after each choice. `userOf(vgpu)`: the name of its owner.
  constructor(userOf, changed) {
    this.changed = changed;
    this.orders = {
      age: null, name: text(named), user: text(userOf), state: text(state), share: most(share),
      memory: most((vgpu) => vgpu.memory_used_bytes), waiting: most((vgpu) => vgpu.waiting_ns),
    };
    this.groups = { nothing: null, user: userOf, state, priority: (vgpu) => vgpu.spec.priority };
    this.order = this.pick("order", this.orders);
    this.group = this.pick("group", this.groups);
    const kept = recalled("rows");
    this.chosen = kept === "compact" ? true : kept === "full" ? false : null;
    $("compact").addEventListener("click", () => this.toggle());
  }

  pick(name, choices) {
    const select = $(name);
    select.append(...Object.keys(choices).map((choice) => el("option", { value: choice }, choice)));
    const kept = recalled(name);
    if (kept in choices) select.value = kept;
    select.addEventListener("change", () => this.choose(name, select.value));
    return select.value;
  }

  choose(name, choice) {
    this[name] = $(name).value = choice;
    keep(name, choice);
    this.changed();
  }

  next(name) {
    const choices = Object.keys(this[`${name}s`]);
    this.choose(name, choices[(choices.indexOf(this[name]) + 1) % choices.length]);
  }

  toggle() {
    this.chosen = !this.compact;
    keep("rows", this.chosen ? "compact" : "full");
    this.changed();
  }

  told(vgpus) {
    this.compact = this.chosen ?? vgpus.length > MANY;
    set(document.body, "data-rows", this.compact ? "compact" : "full");
    set($("compact"), "aria-pressed", String(this.compact));
  }

  // [[group, vgpus], …]; one group without a name where rows are not grouped.
  sorted(vgpus) {
    const order = this.orders[this.order];
    const rows = order ? [...vgpus].sort(order) : vgpus;
    const of = this.groups[this.group];
    if (!of) return [["", rows]];
    const found = new Map();
    for (const vgpu of rows) {
      const group = of(vgpu);
      if (found.has(group)) found.get(group).push(vgpu);
      else found.set(group, [vgpu]);
    }
    return [...found].sort(([a], [b]) => a.localeCompare(b, "en"));
  }
}

export class Heading {
  constructor() {
    this.name = el("b");
    this.said = el("span");
    this.node = el("li", { class: "group" }, this.name, this.said);
  }

  draw(name, words) {
    say(this.name, name);
    say(this.said, words);
  }
}

function recalled(name) {
  try {
    return localStorage.getItem(`vgpu-${name}`);
  } catch {
    return null;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(`vgpu-${name}`, value);
  } catch {
    // Then it is chosen for this page alone.
  }
}
