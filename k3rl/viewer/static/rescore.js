// Stored rollouts under another reward, without the model: before and after, side by side.

import { get, post } from "./api.js";
import { changeBar } from "./charts.js";
import { button, empty, errorBox, h, number, replace } from "./dom.js";
import { filterBox } from "./filter.js";
import { bindKeys } from "./keys.js";
import { address, changed, go, listParameters, place, rolloutAddress } from "./router.js";

const LIMITS = ["50", "200", "1000", "2000"];
const SHOWN = 500;

export async function showRescore(main, { here, current }) {
  const { rewards } = await get("rewards");
  if (!current()) return null;
  const answer = h("div", { "aria-live": "polite" }, empty("Choose a reward and run it over the selection.", "Nothing is stored: this shows what would have been."));
  const filter = filterBox({ value: here.get("filter"), onSubmit: (text) => go(changed({ filter: text }), { quietly: true }), label: "Which rollouts" });
  const reward = h("select", { "aria-label": "Reward" }, rewards.map((r) => h("option", { value: r, selected: r === here.get("reward") }, r)));
  const given = h("textarea", { rows: 2, class: "sql", spellcheck: "false", "aria-label": "Arguments", placeholder: 'arguments, one a line: name = value, such as pattern = "[0-9]+"' }, here.get("arguments"));
  const limit = h("select", { "aria-label": "At most" }, LIMITS.map((n) => h("option", { value: n, selected: n === here.get("limit", "200") }, n)));
  const text_only = h("input", { type: "checkbox", checked: here.get("text_only") !== "" });
  const run = async () => {
    go(changed({ filter: filter.input.value.trim(), reward: reward.value, arguments: given.value.trim(), limit: limit.value, text_only: text_only.checked ? "true" : "" }), { quietly: true });
    const { run: runs, filter: text, sort, descending } = listParameters(place());
    start.disabled = true;
    replace(answer, h("p", { class: "faint" }, "Scoring… this takes up to two minutes."));
    try {
      const body = { run: runs, filter: text, sort, descending: descending !== "", reward: reward.value, arguments: argumentsOf(given.value), limit: Number(limit.value), text_only: text_only.checked };
      const found = await post("rescore", body);
      if (current()) replace(answer, result(found));
    } catch (error) {
      if (error.position !== undefined) filter.showError(error);
      if (current()) replace(answer, errorBox(error));
    } finally {
      start.disabled = false;
    }
  };
  const start = button("Score again", run, { class: "primary" });
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, "Re-score"), filter.box),
    h("div", { class: "bar" }, h("label", { class: "inline" }, "Reward", reward), h("label", { class: "inline" }, "at most", limit), h("label", { class: "inline", title: "It looks at the text alone: lost sandboxes do not matter to it." }, text_only, "reads only the text"), start),
    given,
    answer,
  );
  bindKeys({ "/": () => filter.input.focus() });
  return {};
}

/** `name = value` a line; what reads as JSON is that, everything else is a word. Throws an Error that names the line. */
export function argumentsOf(text) {
  const found = {};
  for (const line of text.split("\n").map((l) => l.trim()).filter(Boolean)) {
    const parts = /^(\w+)\s*=\s*(.*)$/.exec(line);
    if (!parts) throw new Error(`arguments: '${line}' is not name = value`);
    try {
      found[parts[1]] = JSON.parse(parts[2]);
    } catch {
      found[parts[1]] = parts[2];
    }
  }
  return found;
}

function result({ reward, summary, rows }) {
  const facts = [["rollouts", summary.rollouts], ["scored", summary.scored], ["mean before", summary.mean_before], ["mean after", summary.mean_after], ["changed", summary.changed], ["groups with another best", summary.other_best]];
  const sorted = rows.toSorted((a, b) => Math.abs(b.change ?? 0) - Math.abs(a.change ?? 0));
  return [
    h("div", { class: "summary", role: "group", "aria-label": "Summary" }, facts.map(([name, value]) => h("div", { class: "card" }, h("b", {}, number(value)), h("span", { class: "faint" }, name)))),
    Object.entries(summary.not_replayed).map(([why, count]) => h("p", { class: "unreplayed" }, h("span", { class: "tag warn" }, `${number(count)} not replayed`), why)),
    h(
      "div",
      { class: "scroll" },
      h("table", { class: "plain cells", "aria-label": `Before and after ${reward}` }, h("thead", {}, h("tr", {}, ["rollout", "problem", "before", "after", "change", "what it said before", "what it says now"].map((n) => h("th", { scope: "col" }, n)))), h("tbody", {}, sorted.slice(0, SHOWN).map(line))),
    ),
    rows.length > SHOWN ? h("p", { class: "faint" }, `The ${SHOWN} that changed most are listed.`) : null,
  ];
}

function line(r) {
  const parts = (values) => h("span", { class: "faint" }, Object.entries(values ?? {}).map(([name, value]) => ` ${name} ${number(value)}`).join(","));
  const before = r.task_before ?? r.before;
  return h(
    "tr",
    {},
    h("td", {}, h("a", { href: rolloutAddress(r) }, `${r.run}, ${r.step}: ${r.draw}.${r.sample}`)),
    h("td", {}, h("a", { href: address("problem", [r.problem_id ?? ""], { run: [r.run] }) }, r.problem_id ?? "")),
    h("td", {}, number(before), r.task_before !== r.before ? h("span", { class: "faint" }, ` (total ${number(r.before)})`) : null),
    h("td", {}, r.after === null ? h("span", { class: "tag warn", title: r.reason }, r.replayed ? r.outcome : "not replayed") : [number(r.after), parts(r.components_after)]),
    h("td", {}, r.change === null ? "–" : changeBar(r.change)),
    h("td", { class: "told" }, r.explanation_before),
    h("td", { class: "told" }, r.explanation_after || r.reason),
  );
}
