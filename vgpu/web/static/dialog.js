// One dialog of index.html: what is refused is said in it, and it stays open with all that was typed.

import { $, say, set, show } from "/static/dom.js";

export class Dialog {
  // `fields`: what the options of vgpuctl are called here, each with `option` and `label`.
  constructor(name, submit, fields = []) {
    this.node = $(name);
    this.labels = new Map(fields.map(({ option, label }) => [option, label]));
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
    const words = error.message.replace(/(?<=^|; )(--[\w-]+)(?=: )/g, (option) => this.labels.get(option) ?? option);
    say(this.refused.querySelector("p"), `${words.charAt(0).toUpperCase()}${words.slice(1)}.`);
    const hint = words === error.message ? error.hint ?? "" : ""; // else it is of the API
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
