// The filter box: an input with completion of columns, comparisons and values.

import { get } from "./api.js";
import { h, replace } from "./dom.js";

const COMPARISONS = {
  number: ["=", "!=", "<", "<=", ">", ">=", "in (", "is null"],
  text: ["=", "!=", "~", "!~", "=~", "in (", "is null"],
  flag: ["= true", "= false"],
  components: ["~"],
};
let known = null;

export async function columns(fresh = false) {
  if (!known || fresh) known = (await get("columns")).columns;
  return known;
}

/** `onSubmit(text)` when a person is done; `showError(error)` marks where the trouble is. */
export function filterBox({ value, onSubmit, label = "Filter", placeholder = 'reward < 0.2 and effort = "max" and text ~ "carry"' }) {
  const list = h("ul", { class: "completions", role: "listbox", id: "completions", hidden: true });
  const input = h("input", {
    class: "filter-input", type: "text", value, placeholder, spellcheck: "false", autocomplete: "off", role: "combobox",
    "aria-label": label, "aria-expanded": "false", "aria-controls": "completions", "aria-autocomplete": "list",
  });
  const trouble = h("p", { class: "filter-error", role: "alert", hidden: true });
  let offered = [];
  let at = -1;
  const close = () => {
    offered = [];
    at = -1;
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
  };
  const choose = (item) => {
    const after = input.value.slice(input.selectionStart);
    const before = input.value.slice(0, item.from) + item.text + (item.open ? "" : " ");
    input.value = before + after.trimStart();
    input.setSelectionRange(before.length, before.length);
    input.focus();
    complete();
  };
  const mark = () => {
    [...list.children].forEach((c, i) => c.setAttribute("aria-selected", i === at));
    list.children[at]?.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", at >= 0 ? `completion-${at}` : "");
  };
  const complete = async () => {
    const found = suggestions(input.value.slice(0, input.selectionStart), await columns());
    if (document.activeElement !== input || !found.length) return close();
    offered = found.slice(0, 12);
    at = -1;
    replace(list, offered.map((item, i) => h("li", { role: "option", id: `completion-${i}`, onmousedown: (e) => (e.preventDefault(), choose(item)) }, h("code", {}, item.label ?? item.text), h("span", { class: "faint" }, item.meaning ?? ""))));
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    mark();
  };
  const submit = () => {
    close();
    trouble.hidden = true;
    onSubmit(input.value.trim());
  };
  input.addEventListener("input", complete);
  input.addEventListener("focus", complete);
  input.addEventListener("click", complete);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (!offered.length) return;
      event.preventDefault();
      at = (at + (event.key === "ArrowDown" ? 1 : -1) + offered.length + (at < 0 && event.key === "ArrowUp" ? 1 : 0)) % offered.length;
      mark();
    } else if (event.key === "Tab" && offered.length) {
      event.preventDefault();
      choose(offered[Math.max(0, at)]);
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (at >= 0) choose(offered[at]);
      else submit();
    } else if (event.key === "Escape" && offered.length) {
      event.stopPropagation();
      close();
    }
  });
  const box = h("div", { class: "filter" }, h("div", { class: "filter-row" }, input), list, trouble);
  const showError = (error) => {
    trouble.hidden = false;
    const where = error.position;
    replace(trouble, where === undefined ? null : h("code", {}, input.value.slice(Math.max(0, where - 12), where), h("mark", {}, input.value.slice(where, where + 12) || " ")), ` ${error.message}`);
  };
  return { box, input, showError, submit };
}

/** What may come next after `text`. */
export function suggestions(text, columnList) {
  const inString = /"[^"]*$/.test(text.replace(/"(?:[^"\\]|\\.)*"/g, ""));
  if (inString) return [];
  const word = /[\w.:/-]*$/.exec(text)[0];
  const from = text.length - word.length;
  const before = text.slice(0, from).trimEnd();
  const find = (name) => columnList.find((c) => c.name === name);
  const comparing = /([\w.]+)\s*(<=|>=|!=|!~|=~|=|<|>|~|in\s*\((?:[^)]*,)?)$/i.exec(before);
  if (comparing) {
    const values = find(comparing[1])?.values ?? [];
    return values.filter((v) => v.toLowerCase().startsWith(word.toLowerCase())).map((v) => ({ from, text: `"${v.replaceAll('"', '\\"')}"` }));
  }
  if (before === "" || /(\(|\band|\bor|\bnot)$/i.test(before)) {
    const matching = columnList.filter((c) => c.name.toLowerCase().includes(word.toLowerCase()));
    matching.sort((a, b) => b.name.startsWith(word) - a.name.startsWith(word));
    if (matching.length === 1 && matching[0].name === word) return [];
    return matching.map((c) => ({ from, text: c.name, meaning: c.meaning }));
  }
  const column = find(/([\w.]+)$/.exec(before)?.[1] ?? "");
  const expects = /(?:^|\(|\band|\bor|\bnot)\s*[\w.]+$/i.test(before);
  if (column && expects && word === "") return COMPARISONS[column.kind].map((c) => ({ from, text: c, open: c.endsWith("(") }));
  if (!expects && text.endsWith(" ") && word === "") return ["and", "or"].map((c) => ({ from, text: c }));
  return [];
}
