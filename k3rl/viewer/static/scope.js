// Which run and step a page is about, where it is about one.

import { h } from "./dom.js";
import { changed, go } from "./router.js";

/** The run that the address names as `of`, if it is among the chosen; else the first. */
export function runOf(here, runs) {
  return runs.includes(here.get("of")) ? here.get("of") : runs[0];
}

export function runPicker(here, runs) {
  if (runs.length < 2) return h("span", { class: "faint" }, runs[0] ?? "");
  return picker("Run", "of", runs.map((r) => [r, r]), runOf(here, runs));
}

/** `steps`: all that there are; `otherwise`: what no step in the address means. */
export function stepPicker(here, steps, otherwise) {
  return picker("Step", "step", [["", otherwise], ...steps.map((s) => [String(s), String(s)]).reverse()], here.get("step"));
}

/** A choice that lives in the address under `name`. `options`: [value, text]. */
export function picker(label, name, options, now) {
  const select = h("select", { onchange: (e) => go(changed({ [name]: e.target.value })) }, options.map(([value, text]) => h("option", { value, selected: value === now }, text)));
  return h("label", { class: "inline" }, label, select);
}
