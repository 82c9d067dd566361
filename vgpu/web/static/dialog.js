// One dialog of index.html: what is refused is said in it, and it stays open with all that was typed.

import { $, say, set, show } from "/static/dom.js";

export class Dialog {
  // `labels`: what a field of the request is called here.
  constructor(name, submit, labels = {}) {
    this.node = $(name);
    this.labels = labels;
    this.refused = $(`${name}-refused`);
    this.go = $(`${name}-go`);
    for (const button of this.node.querySelectorAll("[data-close]")) button.addEventListener("click", () => this.node.close());
    this.node.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.try(submit);
    });
  }

  open() {
    this.refuse(null);
    if (!this.node.open) this.node.showModal();
  }

  refuse(error) {
    show(this.refused, error !== null);
    if (!error) return;
    const [, key, rest] = error.message.match(/^(\w+): (.*)$/s) ?? [];
    const label = this.labels[key];
    const words = label ? `${label}: ${rest}` : error.message;
    say(this.refused.querySelector("p"), `${words.charAt(0).toUpperCase()}${words.slice(1)}.`);
    const hint = label ? "" : error.hint ?? ""; // which is of the API, where the request is at fault
    say(this.refused.querySelector("code"), hint);
    show(this.refused.querySelector("code"), Boolean(hint));
  }

  async try(submit) {
    if (this.busy) return;
    this.busy = true;
    set(this.go, "aria-busy", "true");
    this.refuse(null);
    try {
      await submit();
      this.node.close();
    } catch (error) {
      this.refuse(error);
    } finally {
      this.busy = false;
      set(this.go, "aria-busy", null);
    }
  }
}
