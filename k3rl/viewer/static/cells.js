// Domain x effort: what each cell earns, how long it thinks against its budget, and how much of the training it is.

import { get } from "./api.js";
import { meter } from "./charts.js";
import { empty, h, number, percent, replace } from "./dom.js";
import { bindKeys } from "./keys.js";
import { address, changed, go } from "./router.js";
import { picker, runOf, runPicker, stepPicker } from "./scope.js";

const EFFORTS = ["low", "high", "max"];
/** `good`: which end of the numbers is; 0 where neither. */
const NUMBERS = {
  reward_mean: { label: "reward", good: 1, meaning: "mean reward of those that were scored" },
  budget_used: { label: "thinking / budget", share: true, good: 0, meaning: "thinking tokens over the budget, mean" },
  over_budget_share: { label: "over budget", share: true, good: -1, meaning: "share that thought longer than the budget" },
  truncated_share: { label: "truncated", share: true, good: -1, meaning: "share that a limit ended" },
  zero_variance_share: { label: "zero variance", share: true, good: -1, meaning: "share of groups whose rewards are all the same" },
  staleness_mean: { label: "staleness", good: -1, meaning: "mean version distance of the tokens" },
  tokens_share: { label: "tokens trained", share: true, good: 0, meaning: "share of the tokens that were trained on" },
  teacher_kl: { label: "teacher KL", good: -1, meaning: "policy against teacher, nats a token" },
  unscored_share: { label: "not scored", share: true, good: -1, meaning: "share without a reward" },
};

export async function showCells(main, { here, runs, current }) {
  const run = runOf(here, runs);
  const whole = here.get("step") === "all";
  const data = await get("cells", { run, step: whole ? "" : here.get("step"), whole });
  if (!current()) return null;
  const by = here.get("number") in NUMBERS ? here.get("number") : "reward_mean";
  const steps = [["", "newest"], ["all", "all together"], ...data.steps.map((s) => [String(s), String(s)]).reverse()];
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, "Domain × effort"), runPicker(here, runs), picker("Step", "step", steps, here.get("step")), h("span", { class: "faint" }, data.step === null ? `all ${number(data.steps.length)} steps` : `step ${data.step}`)),
    data.cells.length
      ? [h("div", { class: "bar" }, picker("Show", "number", Object.entries(NUMBERS).map(([n, c]) => [n, c.label]), by), h("span", { class: "faint" }, NUMBERS[by].meaning)), matrix(data.cells, by), h("h2", {}, "All numbers"), details(data.cells)]
      : empty("This run has no rollouts yet."),
    data.derived.ready ? null : h("p", { class: "faint" }, `Teacher KL is still being read: ${number(data.derived.done)} of ${number(data.derived.total)} files.`),
  );
  bindKeys({ ArrowLeft: () => walk(data, -1), ArrowRight: () => walk(data, 1) });
  return { update: () => current() && !main.contains(document.activeElement?.closest?.("select")) && showCells(main, { here, runs, current }) };
}

/** The step before or after the one that is shown. */
function walk({ step, steps }, by) {
  const at = step === null ? steps.length : steps.indexOf(step);
  const next = steps[Math.max(0, Math.min(steps.length - 1, at + by))];
  if (next !== undefined && next !== step) go(changed({ step: next }));
}

function rolloutsOf(cell) {
  return address("rollouts", [], { run: [cell.run], filter: cell.filter });
}

function shown(cell, by) {
  return NUMBERS[by].share ? percent(cell[by]) : number(cell[by]);
}

/** low, high, max, then whatever else a run calls its efforts. */
function byEffort(a, b) {
  const rank = (e) => (EFFORTS.includes(e) ? EFFORTS.indexOf(e) : EFFORTS.length);
  return rank(a) - rank(b) || String(a).localeCompare(String(b));
}

function matrix(cells, by) {
  const efforts = [...new Set(cells.map((c) => c.effort))].sort(byEffort);
  const domains = [...new Set(cells.map((c) => c.domain))];
  const values = cells.map((c) => c[by]).filter((v) => v !== null);
  const [low, high] = [Math.min(0, ...values), Math.max(...values, 1e-9)];
  const color = ["var(--negative)", "var(--accent)", "var(--positive)"][NUMBERS[by].good + 1];
  const square = (domain, effort) => {
    const cell = cells.find((c) => c.domain === domain && c.effort === effort);
    if (!cell) return h("td", { class: "faint" }, "–");
    const strength = cell[by] === null ? 0 : Math.round(45 * ((cell[by] - low) / (high - low || 1)));
    return h("td", { style: { background: `color-mix(in oklab, ${color} ${strength}%, transparent)` } }, h("a", { href: rolloutsOf(cell), title: "Its rollouts" }, h("b", {}, shown(cell, by)), h("span", { class: "faint" }, cell.rollouts === 1 ? "1 rollout" : `${number(cell.rollouts)} rollouts`)));
  };
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "matrix", "aria-label": `${NUMBERS[by].label} by domain and effort` },
      h("thead", {}, h("tr", {}, h("td", {}), efforts.map((e) => h("th", { scope: "col" }, e || "no effort")))),
      h("tbody", {}, domains.map((d) => h("tr", {}, h("th", { scope: "row" }, d || "no domain"), efforts.map((e) => square(d, e))))),
    ),
  );
}

function details(cells) {
  const most = Math.max(1, ...cells.map((c) => Math.max(c.thinking_mean ?? 0, c.budget_mean ?? 0)));
  const rewards = cells.map((c) => c.reward_mean ?? 0);
  const range = [Math.min(0, ...rewards), Math.max(1e-9, ...rewards)];
  const td = (content, bad = false) => h("td", { class: bad ? "bad-text" : null }, content);
  const names = ["domain", "effort", "rollouts", "reward", "thinking against budget", "over budget", "truncated", "zero variance", "staleness", "tokens trained", "teacher KL"];
  const line = (c) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("a", { href: rolloutsOf(c) }, c.domain || "no domain")),
      h("td", {}, c.effort || "–"),
      td(number(c.rollouts)),
      td([meter(c.reward_mean, range), " ", number(c.reward_mean), c.unscored_share ? h("div", { class: "faint" }, `${percent(c.unscored_share)} not scored`) : null]),
      td(against(c, most)),
      td(percent(c.over_budget_share), c.over_budget_share > 0.5),
      td(percent(c.truncated_share), c.truncated_share > 0.5),
      td([`${number(c.zero_variance_groups)} of ${number(c.groups)}`], c.zero_variance_share > 0.8),
      td(c.staleness_mean === null ? "–" : `${number(c.staleness_mean, 2)}, max ${number(c.staleness_max)}`),
      td([number(c.tokens_trained), h("span", { class: "faint" }, ` ${percent(c.tokens_share)}`)]),
      td(number(c.teacher_kl)),
    );
  return h("div", { class: "scroll" }, h("table", { class: "plain cells", "aria-label": "All numbers by domain and effort" }, h("thead", {}, h("tr", {}, names.map((n) => h("th", { scope: "col" }, n)))), h("tbody", {}, cells.toSorted((a, b) => String(a.domain).localeCompare(String(b.domain)) || byEffort(a.effort, b.effort)).map(line))));
}

/** Thinking as a bar, the budget as a line across it. */
function against(c, most) {
  const bar = meter(c.thinking_mean, [0, most], `thinking ${number(c.thinking_mean)} of ${number(c.budget_mean)} tokens`);
  bar.classList.add("wide-meter");
  if (c.budget_mean !== null) bar.append(h("span", { class: "budget-line", style: { left: `${(100 * c.budget_mean) / most}%` } }));
  return [bar, ` ${number(c.thinking_mean, 0)} / ${c.budget_mean === null ? "–" : number(c.budget_mean, 0)}`];
}
