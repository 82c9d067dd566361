// What happened, newest first.

import { $, el, keyed, show } from "/static/dom.js";
import { clock } from "/static/format.js";

const SHOWN = 100;
const LOUD = new Set(["refused", "overrun", "not-suspended", "not-resumed", "killed-on-resume", "drift", "outside", "unmanaged", "broker-restarted", "server-restarted"]);

export class EventsList {
  constructor() {
    this.kept = new Map();
  }

  // `called(id)`: the name of the vGPU, or the id.
  draw(events, called) {
    const shown = events.slice(-SHOWN).reverse();
    const byKey = new Map(shown.map((event) => [event.key, event]));
    keyed($("events"), this.kept, [...byKey.keys()], (key) => ({ node: line(byKey.get(key), called) }));
    show($("events-empty"), !events.length);
  }
}

const line = (event, called) => el("li", {},
  el("time", { datetime: new Date(event.at_unix_s * 1000).toISOString() }, clock(event.at_unix_s)),
  el("b", { class: LOUD.has(event.kind) ? "kind loud" : "kind" }, event.kind),
  el("span", {}, event.text, " ", event.vgpu_id ? el("a", { href: `#${event.vgpu_id}`, title: event.vgpu_id }, called(event.vgpu_id)) : `GPU ${event.gpu_index}`));
