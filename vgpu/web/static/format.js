// Figures as vgpuctl prints them.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

const three = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));

export function bytes(size) {
  for (const [unit, factor] of UNITS) if (Math.abs(size) >= factor) return `${three(size / factor)} ${unit}`;
  return `${size} B`;
}

// "3.2 / 16 GiB": both in the unit of the second.
export function bytesOf(used, limit) {
  const [unit, factor] = UNITS.find(([, one]) => limit >= one) ?? ["B", 1];
  const part = used / factor;
  return `${part < 1 ? Number(part.toFixed(2)) : three(part)} / ${three(limit / factor)} ${unit}`;
}

export const percent = (ratio) => `${ratio * 100 >= 99.95 ? (ratio * 100).toFixed(0) : (ratio * 100).toFixed(1)} %`;
export const short = (ratio) => `${Number((ratio * 100).toPrecision(3))} %`;
// "15–100 %"
export const range = (least, most) => (most > least + 1e-6 ? `${Number((least * 100).toPrecision(3))}–${short(most)}` : short(least));
const rate = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));
// Of a vGPU or a GPU.
export const tokenRate = (reading) => (reading.open_ended ? "open" : rate(reading.tokens_per_second));
export const OPEN = "a token without an end: no vGPU waits for the GPU";
export const many = (value) => value.toLocaleString("en");

export function duration(ns) {
  const s = ns / 1e9;
  if (s < 1e-3) return `${three(s * 1e6)} µs`;
  if (s < 1) return `${three(s * 1e3)} ms`;
  if (s < 120) return `${three(s)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

// As vgpuctl's tables: the part of the time that a GPU was held, 100 % at most.
export const whole = (ratio) => percent(Math.min(1, ratio));
export const atOnce = (ratio) => (ratio > 1.05 ? `${ratio.toFixed(1)} vGPUs at once` : "");

// A name in two parts: the second one is never cut, as names of one kind differ at their ends.
export function ends(name) {
  const tail = name.length > 12 ? 7 : 0;
  return [name.slice(0, name.length - tail), name.slice(name.length - tail)];
}

export function middle(name, most) {
  if (name.length <= most) return name;
  const tail = Math.floor((most - 1) / 2);
  return `${name.slice(0, most - 1 - tail)}…${name.slice(name.length - tail)}`;
}

export const clock = (unixS) => new Date(unixS * 1000).toLocaleTimeString("en-GB");
export const count = (number, thing, several = `${thing}s`) => `${many(number)} ${number === 1 ? thing : several}`;

// What one types for such a size: "8G", "512M".
export function typed(size) {
  for (const [letter, factor] of [["T", 2 ** 40], ["G", 2 ** 30], ["M", 2 ** 20]]) {
    if (size % factor === 0) return `${size / factor}${letter}`;
  }
  return String(size);
}

export function typedDuration(ns) {
  for (const [letter, factor] of [["d", 864e11], ["h", 36e11], ["m", 6e10], ["s", 1e9], ["ms", 1e6]]) {
    if (ns % factor === 0) return `${ns / factor}${letter}`;
  }
  return `${ns}ns`;
}

export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`);
