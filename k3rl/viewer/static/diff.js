// Where texts part: the common beginning of two texts, and both drawn with that place marked.

import { h, number } from "./dom.js";

const SHOWN = 6000;
const CONTEXT = 240;

/** Length of the common beginning, never inside a surrogate pair. */
export function commonLength(a, b) {
  const most = Math.min(a.length, b.length);
  let i = 0;
  while (i < most && a.charCodeAt(i) === b.charCodeAt(i)) i++;
  const inside = i > 0 && i < most && (a.charCodeAt(i - 1) & 0xfc00) === 0xd800;
  return inside ? i - 1 : i;
}

/** `text` with what it shares with `reference` made faint and the first difference marked. `name`: the reference's.
 *  What is beyond a few screens waits for a click. */
export function divergent(text, reference, name) {
  const same = text === reference;
  const at = same ? text.length : commonLength(text, reference);
  const box = h("div", { class: "diverging" });
  const draw = (start, end) => {
    const shared = h("span", { class: "shared" }, text.slice(start, at));
    const mark = h("span", { class: "diverges", role: "note", title: `up to here the same as ${name}` }, same ? `same as ${name}` : at === text.length ? `ends; ${name} goes on` : `≠ from ${name} at character ${number(at)}`);
    const skipped = start > 0 ? more(`… ${number(start)} characters before, the same`, () => draw(0, end)) : null;
    const left = end < text.length ? more(`… ${number(text.length - end)} more characters`, () => draw(start, text.length)) : null;
    box.replaceChildren(...[skipped, shared, mark, text.slice(at, end), left].filter((x) => x !== null));
  };
  draw(at > SHOWN ? at - CONTEXT : 0, at + SHOWN);
  return box;
}

function more(label, onclick) {
  return h("button", { type: "button", class: "quiet", onclick }, label);
}
