// The log of one container, as it comes. Old output leaves the page, so that a long log does not fill the browser.

import { $, el, say, show } from "/static/dom.js";

const LINES = 1000;
const MOST_PIECES = 5000;
const NEAR_PX = 40;
// Colours and movements of a terminal.
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;

export class Log {
  constructor() {
    this.node = $("log");
    this.text = $("log-text");
    this.node.addEventListener("close", () => this.end());
    this.node.querySelector("[data-close]").addEventListener("click", () => this.node.close());
    this.text.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.text;
      this.follows = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    });
  }

  open(container) {
    this.end();
    say($("log-title"), `Log of ${container.name}`);
    this.text.replaceChildren();
    this.follows = true;
    this.tell("waiting for output");
    this.node.showModal();
    this.text.focus();
    this.source = new EventSource(`/api/v1/containers/${container.id}/logs?follow=true&tail=${LINES}`);
    this.source.addEventListener("output", (message) => this.add(JSON.parse(message.data)));
    this.source.addEventListener("failure", (message) => this.end(JSON.parse(message.data).error));
    this.source.addEventListener("end", () => this.end(`${container.name} has ended`));
    this.source.addEventListener("error", () => this.end("the log broke off: open it again"));
  }

  add({ stream, text }) {
    this.tell("live");
    this.text.append(el("span", { class: stream, title: stream === "stderr" && stream }, text.replace(ESCAPES, "").replace(/\r\n?/g, "\n")));
    while (this.text.childNodes.length > MOST_PIECES) this.text.firstChild.remove();
    if (this.follows) this.text.scrollTop = this.text.scrollHeight;
  }

  end(words = "") {
    this.source?.close();
    this.source = null;
    this.tell(words);
  }

  tell(words) {
    say($("log-state"), words);
    show($("log-empty"), Boolean(words) && !this.source && !this.text.childNodes.length);
  }
}
