// Elements made once, and written to only where something has changed.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const made = tag === "svg" || tag === "path" ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (name === "class") made.setAttribute("class", value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child != null && child !== false));
  return made;
}

export function say(node, words) {
  if (node.said === words) return;
  node.said = words;
  node.textContent = words;
}

export function set(node, name, value) {
  const kept = (node.kept ??= {});
  if (kept[name] === value) return;
  kept[name] = value;
  if (value === null || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : value);
}

export function paint(node, property, value) {
  const painted = (node.painted ??= {});
  if (painted[property] === value) return;
  painted[property] = value;
  node.style.setProperty(property, value);
}

export function show(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

// The children of `parent` become those of `keys`, in that order, each made once by `make` and kept in `kept`.
export function keyed(parent, kept, keys, make) {
  const wanted = new Set(keys);
  for (const [key, thing] of kept) {
    if (wanted.has(key)) continue;
    thing.gone?.();
    thing.node.remove();
    kept.delete(key);
  }
  let before = parent.firstChild;
  for (const key of keys) {
    let thing = kept.get(key);
    if (!thing) kept.set(key, (thing = make(key)));
    if (thing.node === before) before = before.nextSibling;
    else parent.insertBefore(thing.node, before);
  }
}
