// What the node says: the stream that is open while the page is seen, and requests. Keeps the last of everything.

const MOST_EVENTS = 300;

export class Refused extends Error {
  constructor({ error, hint, code }) {
    super(error);
    this.hint = hint ?? "";
    this.code = code ?? "internal";
  }
}

export async function ask(method, path, body) {
  let response;
  try {
    response = await fetch(`/api/v1/${path}`, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Refused({ error: "the dashboard does not answer", hint: "vgpuctl dashboard" });
  }
  const answer = await response.json().catch(() => ({ error: `HTTP ${response.status} without words` }));
  if (!response.ok) throw new Refused(answer);
  return answer;
}

export class Node {
  // `changed(what)` is called with "link", "snapshot" or "events".
  constructor(changed) {
    this.changed = changed;
    this.snapshot = null;
    this.link = { connected: false, error: "", hint: "", since_unix_s: Date.now() / 1000, software: "" };
    this.asked = false;
    this.events = [];
    this.known = new Set();
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
  }

  open() {
    if (this.source) return;
    this.source = new EventSource("/api/v1/stream");
    this.source.addEventListener("link", (message) => this.hearLink(JSON.parse(message.data)));
    this.source.addEventListener("event", (message) => this.hearEvent(JSON.parse(message.data)));
    this.source.addEventListener("snapshot", (message) => {
      this.snapshot = JSON.parse(message.data);
      this.changed("snapshot");
    });
    this.source.addEventListener("error", () => this.lost());
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  lost() {
    // The browser tries again by itself, but not where it was refused, as with the cookie of another time.
    if (this.source?.readyState === EventSource.CLOSED) {
      this.close();
      ask("GET", "status").catch((error) => error.code === "not-yours" && location.reload());
      setTimeout(() => document.hidden || this.open(), 2000);
    }
    this.hearLink({
      connected: false, error: "The dashboard itself is not reached.", hint: "vgpuctl dashboard",
      since_unix_s: this.link.connected ? Date.now() / 1000 : this.link.since_unix_s, software: this.link.software,
    });
  }

  hearLink(link) {
    this.asked = true;
    this.link = link;
    this.changed("link");
  }

  hearEvent(event) {
    const key = `${event.at_unix_s} ${event.kind} ${event.vgpu_id} ${event.text}`;
    if (this.known.has(key)) return;
    this.known.add(key);
    this.events.push({ key, ...event });
    while (this.events.length > MOST_EVENTS) this.known.delete(this.events.shift().key);
    this.changed("events");
  }
}
