// Text of tokens with structure tokens as marks of their own: text that only looks like one stays text.

import { h } from "./dom.js";

/** Which ids of a rollout are structure tokens. */
export function specials(tokens) {
  return new Set(tokens.special ?? []);
}

/** Nodes for the tokens from `start` to `end`: text, and a mark for every structure token. */
export function marked(ids, pieces, special, start = 0, end = ids.length) {
  const found = [];
  let text = "";
  for (let i = start; i < end; i++) {
    if (!special.has(ids[i])) {
      text += pieces[i];
      continue;
    }
    if (text) found.push(text);
    text = "";
    found.push(h("span", { class: "special", title: `structure token ${ids[i]}` }, pieces[i]));
  }
  if (text) found.push(text);
  return found;
}
