// A group: the samples of one draw of a problem side by side, with what each earned and where each parts from another.

import { get } from "./api.js";
import { meter } from "./charts.js";
import { divergent } from "./diff.js";
import { button, empty, h, number, replace } from "./dom.js";
import { bindKeys } from "./keys.js";
import { promptView } from "./reading.js";
import { address, changed, go, groupAddress, listParameters, place, problemAddress, rolloutAddress } from "./router.js";
import { picker } from "./scope.js";
import { flagMark, tone } from "./table.js";

const TEXTS = { response_text: "exact response", reasoning: "thinking", content: "answer" };
const ORDERS = { sample: (r) => r.sample, reward: (r) => -(r.reward ?? -Infinity), length: (r) => r.sampled_tokens ?? 0 };

export async function showGroup(main, { here, current }) {
  const [run, step, draw] = here.parts;
  const { samples } = await get("group", { run, step, draw });
  if (!current()) return null;
  if (!samples.length) return replace(main, empty("This group has no rollouts here."));
  const list = listParameters(here);
  const columns = h("div", { class: "samples" });
  const first = samples[0];
  replace(main, heading(first.row, samples, list), controls(here, samples), h("details", { class: "group-prompt", open: true }, h("summary", {}, "Problem"), promptView(first)), columns);
  drawSamples(columns, samples, here, list);
  bindSteps(columns, first.row, list);
  return {};
}

/** Keys: along the samples, to the next group of the step, and up. */
function bindSteps(columns, row, list) {
  const links = [...columns.querySelectorAll(".sample-open")];
  const walk = (by) => links[Math.max(0, Math.min(links.length - 1, links.indexOf(document.activeElement) + by))]?.focus();
  const other = async (comparison, descending) => {
    const found = await get("rollouts", { run: [row.run], filter: `step = ${row.step} and draw ${comparison} ${row.draw}`, sort: "draw", descending, limit: 1 });
    if (found.rows.length) go(groupAddress(found.rows[0], list));
  };
  const next = () => walk(1);
  const previous = () => walk(-1);
  bindKeys({ j: next, k: previous, ArrowRight: next, ArrowLeft: previous, n: () => other(">", false), p: () => other("<", true), u: () => go(address("rollouts", [], list)) });
}

function heading(row, samples, list) {
  const rewards = samples.map((s) => s.row.reward).filter((r) => r !== null);
  const flat = rewards.length > 1 && rewards.every((r) => r === rewards[0]);
  return h(
    "div",
    { class: "bar rollout-head" },
    h("nav", { class: "crumbs", "aria-label": "Where this is" }, h("a", { href: address("rollouts", [], list) }, "Rollouts"), ` / ${row.run} / `, h("a", { href: address("rollouts", [], { run: [row.run], filter: `step = ${row.step}` }) }, `step ${row.step}`), " / "),
    h("h1", {}, `group ${row.draw}`),
    h("a", { class: "problem", href: problemAddress(row, list), title: "This problem over time and runs" }, row.problem_id ?? ""),
    [row.domain, row.effort].filter(Boolean).map((x) => h("span", { class: "tag" }, x)),
    h("span", { class: "faint" }, `${number(samples.length)} samples, reward ${number(row.group_reward_mean)} ± ${number(row.group_reward_std)}`),
    flat ? h("span", { class: "tag warn" }, "zero variance: no signal") : null,
    h("a", { class: "button", href: address("rollouts", [], { run: [row.run], filter: `step = ${row.step} and draw = ${row.draw}`, sort: "sample" }) }, "As a table"),
  );
}

function controls(here, samples) {
  const there = Object.entries(TEXTS).filter(([name]) => samples.some((s) => s.texts[name]));
  return h(
    "div",
    { class: "bar" },
    picker("Show", "text", there, shownText(here, samples)),
    picker("Compare with", "against", samples.map((s) => [String(s.row.sample), `sample ${s.row.sample}`]), String(reference(here, samples).row.sample)),
    picker("Order by", "order", Object.keys(ORDERS).map((o) => [o, o]), here.get("order", "sample")),
  );
}

function shownText(here, samples) {
  const asked = here.get("text");
  return asked in TEXTS ? asked : Object.keys(TEXTS).find((name) => samples.some((s) => s.texts[name])) ?? "content";
}

function reference(here, samples) {
  return samples.find((s) => String(s.row.sample) === here.get("against")) ?? samples[0];
}

function drawSamples(columns, samples, here, list) {
  const name = shownText(here, samples);
  const base = reference(here, samples);
  const by = ORDERS[here.get("order")] ?? ORDERS.sample;
  const rewards = samples.map((s) => s.row.reward ?? 0);
  const range = [Math.min(0, ...rewards), Math.max(1e-9, ...rewards)];
  replace(columns, samples.toSorted((a, b) => by(a.row) - by(b.row)).map((s) => sampleColumn(s, base, name, range, list)));
}

function sampleColumn({ row, texts }, base, name, range, list) {
  const isBase = base.row.sample === row.sample;
  const text = texts[name] ?? "";
  const told = isBase ? h("div", { class: "diverging" }, text) : divergent(text, base.texts[name] ?? "", `sample ${base.row.sample}`);
  return h(
    "article",
    { class: `sample ${isBase ? "base" : ""}`, "aria-label": `Sample ${row.sample}`, dataset: { sample: row.sample } },
    h(
      "header",
      {},
      h("div", { class: "sample-line" }, h("a", { class: "sample-open", href: rolloutAddress(row, list) }, `sample ${row.sample}`), flagMark(row), isBase ? h("span", { class: "tag" }, "compared with") : button("compare with", () => go(changed({ against: row.sample })), { class: "quiet" })),
      h("div", { class: "sample-line" }, row.reward === null ? h("span", { class: "tag bad" }, row.reward_outcome ?? "not scored") : [meter(row.reward, range, `reward ${number(row.reward)}`), h("b", {}, number(row.reward))], advantage(row.advantage)),
      h("div", { class: "sample-line faint" }, Object.entries(row.reward_components ?? {}).map(([part, value]) => h("span", {}, `${part} ${number(value)}`))),
      h("div", { class: "sample-line" }, h("span", { class: "faint" }, `${number(row.sampled_tokens)} tokens`), row.stop_reason ? h("span", { class: `tag ${tone(row.stop_reason)}` }, row.stop_reason) : null, row.fate && row.fate !== "trained" ? h("span", { class: `tag ${tone(row.fate)}` }, row.fate) : null),
    ),
    text ? told : h("p", { class: "faint" }, row.error || "Nothing here."),
  );
}

export function advantage(value) {
  if (value === null || value === undefined) return null;
  return h("span", { class: `advantage ${value > 0 ? "positive" : value < 0 ? "negative" : ""}` }, `adv. ${value > 0 ? "+" : ""}${number(value)}`);
}
