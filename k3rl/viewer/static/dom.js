// Elements without innerHTML: whatever a rollout says becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `attributes`: `class`, `style` (an object), `onclick` and other handlers, `dataset`, or plain attributes;
 *  null, undefined and false leave one out. Children: nodes, text, lists of them; null is left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false);
}

export function replace(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

/** A number as people read it: short, and honest about what is missing. */
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return Math.abs(value) < 1e6 ? value.toLocaleString("en") : compact(value);
  const size = Math.abs(value);
  if (size >= 1e6) return compact(value);
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(1);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 1 : digits });
}

function compact(value) {
  return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${number(100 * value, 1)} %`;
}

export function button(label, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, label);
}

export function errorBox(error) {
  return h("div", { class: "error", role: "alert" }, h("strong", {}, "That did not work. "), String(error.message ?? error));
}

export function empty(title, ...more) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), ...more.map((m) => h("p", {}, m)));
}

/** A message that goes away by itself; read out by screen readers. */
export function toast(text) {
  let area = document.getElementById("toasts");
  if (!area) document.body.append((area = h("div", { id: "toasts", role: "status", "aria-live": "polite" })));
  const item = h("div", { class: "toast" }, text);
  area.append(item);
  setTimeout(() => item.remove(), 3500);
}

export async function copyText(text, what) {
  await navigator.clipboard.writeText(text);
  toast(`${what} copied`);
}

/** Hands a blob to the person as a file. */
export function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
