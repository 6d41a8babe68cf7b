// Problems over time or between two runs: always solved, never solved, most changed.

import { get } from "./api.js";
import { changeBar } from "./charts.js";
import { h, number, percent, replace } from "./dom.js";
import { bindKeys } from "./keys.js";
import { changed, go, problemAddress } from "./router.js";
import { picker, runOf, runPicker } from "./scope.js";

const KINDS = [
  ["changed", "Most changed", "By how far the mean reward moved."],
  ["never", "Never solved", "No rollout was solved: too hard for this policy, or graded wrongly."],
  ["always", "Always solved", "Every rollout was solved: nothing is left to learn from them."],
];
const LISTED = 100;

export async function showProblems(main, { here, runs, current }) {
  const run = runOf(here, runs);
  const other = runs.includes(here.get("with")) && here.get("with") !== run ? here.get("with") : "";
  const solved = here.get("solved", "0.5");
  const found = await get("compare/problems", { run: other ? [run, other] : [run], solved, limit: LISTED });
  if (!current()) return null;
  const others = runs.filter((r) => r !== run);
  const limit = h("input", { type: "text", class: "short", inputmode: "decimal", value: solved, "aria-label": "Solved above this reward", onchange: (e) => go(changed({ solved: e.target.value === "0.5" ? "" : e.target.value })) });
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, "Compare"), runPicker(here, runs), others.length ? picker("against", "with", [["", "its own first draws"], ...others.map((r) => [r, r])], other) : null, h("label", { class: "inline" }, "solved above", limit), h("span", { class: "faint" }, `${number(found.total)} problems`)),
    h("p", { class: "faint" }, other ? `Change: mean reward in ${other} minus that in ${run}.` : "Change: mean reward of a problem's last draw minus that of its first."),
    KINDS.map(([kind, title, meaning]) => section(found[kind], title, meaning, { kind, runs: other ? [run, other] : [run], other })),
  );
  bindKeys({ "/": () => limit.focus() });
  return {};
}

function section({ count, problems }, title, meaning, { kind, runs, other }) {
  const heads = ["problem", "domain", "rollouts", ...(kind === "changed" ? [other ? runs[0] : "first", other || "last", "change"] : ["mean reward"]), "solved"];
  const open = kind === "changed" || count <= 12;
  return h(
    "details",
    { class: "family", open, dataset: { kind } },
    h("summary", {}, title, h("span", { class: "count" }, number(count))),
    h("p", { class: "faint" }, count ? meaning : "No problem is like that.", count > problems.length ? ` The first ${number(problems.length)} are listed.` : ""),
    problems.length ? h("div", { class: "scroll" }, h("table", { class: "plain problems", "aria-label": title }, h("thead", {}, h("tr", {}, heads.map((n) => h("th", { scope: "col" }, n)))), h("tbody", {}, problems.map((p) => line(p, kind, runs))))) : null,
  );
}

function line(p, kind, runs) {
  const numbers = kind === "changed" ? [h("td", {}, number(p.first_mean)), h("td", {}, number(p.last_mean)), h("td", {}, changeBar(p.change))] : [h("td", {}, number(p.reward_mean))];
  return h("tr", {}, h("th", { scope: "row" }, h("a", { href: problemAddress(p, { run: runs }) }, p.problem_id)), h("td", {}, p.domain ?? "–"), h("td", {}, number(p.rollouts)), numbers, h("td", {}, percent(p.solved_share)));
}
