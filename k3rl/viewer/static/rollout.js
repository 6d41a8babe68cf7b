// One rollout: read it, look at its tokens, see its ids; flag it and comment on it.

import { bundle, get, post } from "./api.js";
import { available, COLOURINGS } from "./colour.js";
import { button, copyText, h, number, replace, toast } from "./dom.js";
import { factsPanel } from "./facts.js";
import { bindKeys } from "./keys.js";
import { readingView } from "./reading.js";
import { address, changed, go, groupAddress, listParameters, place, problemAddress, rolloutAddress } from "./router.js";
import { marked, specials } from "./special.js";
import { tokenView } from "./tokens.js";

const MARKED = 20000;
const LONGEST = 60000;
const MODES = { read: "Read", tokens: "Tokens", raw: "Exact" };

export async function showRollout(main, { here, current }) {
  const [run, step, draw, sample] = here.parts;
  const key = { run, step, draw, sample };
  const whole = await get("rollout", key);
  if (!current()) return null;
  const list = listParameters(here);
  const body = h("div", { class: "rollout-body" });
  const modes = h("div", { class: "modes", role: "tablist", "aria-label": "How to look at it" });
  const walk = h("div", { class: "walk" });
  let view = null;
  let shown = "";
  const choose = (i) => go(changed({ token: i }), { quietly: true });
  const toToken = (i) => {
    go(changed({ mode: "tokens", token: i }), { quietly: true });
    draw_(i);
  };

  function draw_(token = null) {
    const now = place();
    const hasColours = COLOURINGS.some((c) => c.name !== "channel" && available(whole.tokens, c));
    const mode = now.get("mode") || (now.get("token") || now.get("colour") ? "tokens" : "read");
    replace(modes, Object.entries(MODES).filter(([m]) => m !== "tokens" || whole.tokens.ids.length).map(([m, name]) => button(name, () => (go(changed({ mode: m }), { quietly: true }), draw_()), { role: "tab", "aria-selected": String(m === mode), dataset: { mode: m } })));
    view?.leave();
    view = null;
    if (shown && shown !== mode) main.parentElement.scrollTop = 0;
    shown = mode;
    if (mode === "tokens" && whole.tokens.ids.length) {
      const given = token ?? (now.get("token") === "" ? null : Number(now.get("token")));
      view = tokenView(whole.tokens, { colour: now.get("colour") || (hasColours ? "logprob" : "channel"), chosen: given, onChoose: choose, onColour: (c) => go(changed({ colour: c }), { quietly: true }) });
      replace(body, view.view);
    } else if (mode === "raw") replace(body, rawView(whole));
    else replace(body, structureSwitch(), readingView(whole, { structure: now.get("structure") !== "", onToken: toToken }));
  }

  const structureSwitch = () => {
    const on = place().get("structure") !== "";
    if (!whole.tokens.decoded || !whole.tokens.ids.length) return null;
    return h("label", { class: "inline structure-switch" }, h("input", { type: "checkbox", checked: on, onchange: (e) => (go(changed({ structure: e.target.checked ? "true" : "" }), { quietly: true }), draw_()) }), "structure tokens");
  };

  replace(main, heading(whole, list, walk), h("div", { class: "rollout" }, h("div", { class: "rollout-main" }, modes, body), h("div", { class: "rollout-side" }, notePanel(whole.row), factsPanel(whole, { onToken: toToken }))));
  draw_();
  let neighbours = null;
  get("neighbours", { ...list, of_run: run, step, draw, sample }).then((found) => {
    if (!current()) return;
    neighbours = found;
    drawWalk(walk, found, list);
  }, () => replace(walk));
  const move = (to) => to && go(rolloutAddress(to, { ...list, mode: place().get("mode"), colour: place().get("colour") }));
  const flagIt = (flag) => () => main.querySelector(`[data-flag="${flag}"]`)?.click();
  bindKeys({
    n: () => move(neighbours?.next), p: () => move(neighbours?.previous), j: () => move(neighbours?.next), k: () => move(neighbours?.previous),
    u: () => go(address("rollouts", [], list)), G: () => go(groupAddress(whole.row, list)),
    ArrowRight: () => view?.step(1), ArrowLeft: () => view?.step(-1),
    f: flagIt("good"), b: flagIt("bad"), l: flagIt("look"), "/": () => go(address("rollouts", [], list)),
    ...Object.fromEntries(COLOURINGS.map((c) => [c.key, () => view?.colourByKey(c.key)])),
  });
  return { leave: () => view?.leave() };
}

function heading({ row }, list, walk) {
  const kind = [row.domain, row.effort].filter(Boolean).map((x) => h("span", { class: "tag" }, x));
  return h(
    "div",
    { class: "bar rollout-head" },
    h("nav", { class: "crumbs", "aria-label": "Where this is" }, h("a", { href: address("rollouts", [], list) }, "Rollouts"), " / ", h("span", {}, row.run), " / ", h("a", { href: address("rollouts", [], { run: list.run, filter: `step = ${row.step}` }) }, `step ${row.step}`), " / ", h("a", { href: groupAddress(row, list) }, `group ${row.draw}`), " / "),
    h("h1", {}, `sample ${row.sample}`),
    h("span", { class: "problem" }, bundle ? row.problem_id : h("a", { href: problemAddress(row, list), title: "This problem over time and runs" }, row.problem_id ?? "")),
    kind,
    walk,
  );
}

function drawWalk(walk, { place: at, previous, next }, list) {
  const link = (to, name, label) => (to ? h("a", { class: "button", href: rolloutAddress(to, { ...list, mode: place().get("mode"), colour: place().get("colour") }), "aria-label": label }, name) : h("span", { class: "button disabled" }, name));
  replace(walk, link(previous, "← p", "Previous rollout"), at ? h("span", { class: "faint" }, `${number(at)}.`) : null, link(next, "n →", "Next rollout"), button("Copy link", () => copyText(location.href, "Link"), { class: "quiet" }));
}

function rawView(whole) {
  const { tokens, texts } = whole;
  const special = specials(tokens);
  const section = (title, content, copy) => h("section", { class: "raw" }, h("div", { class: "channel-head" }, h("h3", {}, title), button("Copy", () => copyText(copy, title), { class: "quiet", "aria-label": `Copy ${title}` })), h("pre", {}, content));
  const exact = (ids, pieces, text) => (tokens.decoded && ids.length && ids.length <= MARKED ? marked(ids, pieces, special) : clipped(text));
  const said = texts.response_text || texts.content;
  return h(
    "div",
    {},
    h("div", { class: "bar" }, button("Copy as a reproducible prompt", () => copyPrompt(whole), { title: "Messages, exact text, ids and sampling, as JSON" }), special.size ? h("span", { class: "faint" }, "Structure tokens are ", h("span", { class: "special" }, "marked"), "; text that only looks like one is not.") : null),
    section("Prompt, exact", exact(tokens.prompt_ids, tokens.prompt_pieces, texts.prompt_text), texts.prompt_text),
    section("Response, exact", exact(tokens.ids, tokens.text, said), said),
    tokens.prompt_ids.length ? section("Prompt ids", clipped(tokens.prompt_ids.join(" ")), JSON.stringify(tokens.prompt_ids)) : null,
    tokens.ids.length ? section("Response ids", clipped(tokens.ids.join(" ")), JSON.stringify(tokens.ids)) : null,
  );
}

/** All that it takes to sample from here again: what was asked, exactly, of which model, and how it was sampled. */
async function copyPrompt({ row, traces, tokens, texts }) {
  const wanted = (key) => /^(model|models|seed)\b/.test(key) || /(temperature|top_p|top_k|max_tokens|sampling)/.test(key);
  const config = bundle ? { rows: [] } : await get("configs", { run: [row.run] }).catch(() => ({ rows: [] }));
  const asked = Object.fromEntries(["run", "step", "draw", "sample", "policy_version", "problem_id", "effort", "budget_tokens"].map((name) => [name, row[name]]));
  const settings = Object.fromEntries(config.rows.filter((r) => r.set[0] && wanted(r.key)).map((r) => [r.key, r.values[0]]));
  await copyText(JSON.stringify({ ...asked, config: settings, messages: traces.messages, prompt_text: texts.prompt_text, prompt_ids: tokens.prompt_ids }, null, 1), "Prompt");
}

function clipped(text) {
  return text.length <= LONGEST ? text : `${text.slice(0, LONGEST)}\n… ${number(text.length - LONGEST)} more characters; Copy takes all of it`;
}

function notePanel(row) {
  if (bundle) return row.note || row.flag ? h("section", { class: "card note" }, h("h3", {}, "Note"), h("p", {}, [row.flag, row.note].filter(Boolean).join(": "))) : null;
  const text = h("textarea", { rows: 2, "aria-label": "Comment", placeholder: "A comment for others, and for yourself…" }, row.note ?? "");
  const buttons = h("div", { class: "flags", role: "group", "aria-label": "Flag" });
  const save = async (flag) => {
    try {
      await post("notes", { run: row.run, step: row.step, draw: row.draw, sample: row.sample, flag, note: text.value });
      row.flag = flag || null;
      row.note = text.value || null;
      draw();
      toast("Note saved beside the run");
    } catch (error) {
      toast(error.message);
    }
  };
  const draw = () => replace(buttons, [["good", "✓ good"], ["bad", "✗ bad"], ["look", "◉ look"]].map(([flag, name]) => button(name, () => save(row.flag === flag ? "" : flag), { class: `chip flag-${flag} ${row.flag === flag ? "on" : ""}`, "aria-pressed": String(row.flag === flag), dataset: { flag } })), button("Save comment", () => save(row.flag ?? ""), { class: "quiet save-note" }));
  draw();
  return h("section", { class: "card note" }, h("h3", {}, "Note"), buttons, text);
}
