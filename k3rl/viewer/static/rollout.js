// One rollout: read it, look at its tokens, see its ids; flag it and comment on it.

import { bundle, get, post } from "./api.js";
import { available, COLOURINGS } from "./colour.js";
import { button, copyText, h, number, replace, toast } from "./dom.js";
import { factsPanel } from "./facts.js";
import { bindKeys } from "./keys.js";
import { readingView } from "./reading.js";
import { address, changed, go, groupAddress, listParameters, place, problemAddress, rolloutAddress } from "./router.js";
import { tokenView } from "./tokens.js";

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
  const { tokens, texts, row } = whole;
  const section = (title, text, copy) => h("section", { class: "raw" }, h("div", { class: "channel-head" }, h("h3", {}, title), button("Copy", () => copyText(copy ?? text, title), { class: "quiet" })), h("pre", {}, clipped(text)));
  const reproducible = { problem_id: row.problem_id, effort: row.effort, messages: whole.traces.messages, prompt_ids: tokens.prompt_ids, prompt_text: texts.prompt_text };
  return h(
    "div",
    {},
    h("div", { class: "bar" }, button("Copy as a reproducible prompt", () => copyText(JSON.stringify(reproducible, null, 1), "Prompt"), { title: "Messages, exact text and ids, as JSON" })),
    section("Prompt, exact", texts.prompt_text),
    section("Response, exact", texts.response_text || texts.content),
    tokens.prompt_ids.length ? section("Prompt ids", tokens.prompt_ids.join(" "), JSON.stringify(tokens.prompt_ids)) : null,
    tokens.ids.length ? section("Response ids", tokens.ids.join(" "), JSON.stringify(tokens.ids)) : null,
  );
}

function clipped(text) {
  return text.length <= 60000 ? text : `${text.slice(0, 60000)}\n… ${number(text.length - 60000)} more characters; Copy takes all of it`;
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
