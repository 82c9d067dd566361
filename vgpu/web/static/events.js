// What happened, newest first.

import { $, el, keyed, show } from "/static/dom.js";
import { clock } from "/static/format.js";

const SHOWN = 100;
const LOUD = new Set(["refused", "overrun", "not-suspended", "not-resumed", "killed-on-resume", "drift", "outside", "unmanaged", "broker-restarted", "server-restarted", "history-lost"]);

export class EventsList {
  constructor() {
    this.kept = new Map();
  }

  // Lines are made once. `forget`: make them anew, since names of users have come.
  forget() {
    this.kept.forEach((line) => line.node.remove());
    this.kept.clear();
  }

  // `called(id)`: the name of the vGPU, or the id. `users`: their names by uid.
  draw(events, called, users) {
    const shown = events.slice(-SHOWN).reverse();
    const byKey = new Map(shown.map((event) => [event.key, event]));
    keyed($("events"), this.kept, [...byKey.keys()], (key) => ({ node: line(byKey.get(key), called, users) }));
    show($("events-empty"), !events.length);
  }
}

const named = (text, users) => text.replace(/\bby uid (\d+)\b/, (all, uid) => (users[uid] ? `by ${users[uid]}` : all));

const line = (event, called, users) => el("li", {},
  el("time", { datetime: new Date(event.at_unix_s * 1000).toISOString() }, clock(event.at_unix_s)),
  el("b", { class: LOUD.has(event.kind) ? "kind loud" : "kind" }, event.kind),
  el("span", {}, named(event.text, users), " ", event.vgpu_id ? el("a", { href: `#${event.vgpu_id}`, title: event.vgpu_id }, called(event.vgpu_id)) : event.gpu_index < 0 ? "" : `GPU ${event.gpu_index}`));
