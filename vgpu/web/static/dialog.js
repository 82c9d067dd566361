// One dialog of index.html: what is refused is said in it, beside the fields that it is about, and it stays open with all
// that was typed.

import { $, el, say, set, show } from "/static/dom.js";

// What the page itself refuses. `fields`: [[key, why], …].
export class Wrong extends Error {
  constructor(fields, message) {
    super(message);
    this.fields = fields;
  }
}

const OPTION = /(--[\w-]+)(?: ([^\s,;]+))?/g;

export class Dialog {
  // `fields`: what the options of vgpuctl are called here, each with `option`, `label` and `key`.
  constructor(name, submit, fields = []) {
    this.node = $(name);
    this.fields = fields;
    this.of = new Map(fields.map((field) => [field.option, field]));
    this.inputs = new Map();
    this.refused = $(`${name}-refused`);
    this.offers = $(`${name}-offers`);
    this.go = $(`${name}-go`);
    for (const button of this.node.querySelectorAll("[data-close]")) button.addEventListener("click", () => this.node.close());
    this.node.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.try(submit);
    });
    this.node.addEventListener("input", (event) => event.target.getAttribute("aria-invalid") && unmark(event.target));
  }

  open() {
    this.refuse(null);
    if (!this.node.open) this.node.showModal();
  }

  refuse(error) {
    for (const input of this.node.querySelectorAll("[aria-invalid]")) unmark(input);
    this.offers?.replaceChildren();
    show(this.refused, error !== null);
    if (!error) return;
    const words = error.message.replace(/(?<=^|; )(--[\w-]+)(?=: )/g, (option) => this.of.get(option)?.label ?? option);
    say(this.refused.querySelector("p"), `${/^vgpu[- ]/i.test(words) ? words : words.charAt(0).toUpperCase() + words.slice(1)}.`);
    const hint = words === error.message ? error.hint ?? "" : ""; // else it is of the API
    say(this.refused.querySelector("code"), hint);
    show(this.refused.querySelector("code"), Boolean(hint));
    this.mark(error.fields ?? [...this.blamed(error.message), ...this.tooLarge(hint)]);
    if (this.offers) this.offer(hint);
  }

  // The fields that the node's words begin with an option of, each with what it says of it.
  blamed(message) {
    return message.split(/; (?=--[\w-]+: )/).flatMap((part) => {
      const [, option, why] = /^(--[\w-]+): (.*)$/s.exec(part) ?? [];
      return this.of.has(option) ? [[this.of.get(option).key, why]] : [];
    });
  }

  // The fields for which the node's hint has the largest value that fits.
  tooLarge(hint) {
    const sizes = /^the largest that fits: (.*)$/.exec(hint)?.[1] ?? "";
    return [...sizes.matchAll(OPTION)].flatMap(([, option, value]) => (value && this.of.has(option) ? [[this.of.get(option).key, `${value} fits at most`]] : []));
  }

  mark(fields) {
    let first = null;
    for (const [key, why] of fields) {
      const input = this.inputs.get(key) ?? document.getElementById(`${this.node.id}-${key}`);
      if (!input) continue;
      const said = el("small", { class: "wrong", id: `${input.id}-wrong` }, why);
      if (input.type === "checkbox") input.closest("label").lastElementChild.append(said);
      else input.after(said);
      input.setAttribute("aria-invalid", "true");
      input.setAttribute("aria-describedby", said.id);
      const more = input.closest("details");
      if (more) more.open = true;
      first ??= input;
    }
    first?.focus();
  }

  // The values that the hint names, each as a button that fills it in.
  offer(hint) {
    for (const [, option, value] of hint.matchAll(OPTION)) {
      const field = this.of.get(option);
      const input = field && this.inputs.get(field.key);
      if (!input || (value === undefined) !== Boolean(field.tick)) continue;
      this.offers.append(el("button", { type: "button", onclick: () => {
        if (field.tick) input.checked = true;
        else input.value = value;
        input.dispatchEvent(new Event("input", { bubbles: true }));
        this.go.focus();
      } }, field.tick ? field.label : `Use ${field.label.toLowerCase()} ${value}`));
    }
  }

  async try(submit) {
    if (this.busy) return;
    this.busy = true;
    set(this.go, "aria-busy", "true");
    this.refuse(null);
    try {
      const next = await submit();
      this.node.close();
      next?.focus(); // else the browser goes back to where the focus was
    } catch (error) {
      this.refuse(error);
    } finally {
      this.busy = false;
      set(this.go, "aria-busy", null);
    }
  }
}

function unmark(input) {
  input.removeAttribute("aria-invalid");
  input.removeAttribute("aria-describedby");
  document.getElementById(`${input.id}-wrong`)?.remove();
}
