// Named ways in which a run goes wrong, each one click from the rollouts that show it.

import { get } from "./api.js";
import { h, number, percent, replace } from "./dom.js";
import { address } from "./router.js";
import { runOf, runPicker, stepPicker } from "./scope.js";

export async function showFindings(main, { here, runs, current }) {
  const run = runOf(here, runs);
  const [found, { steps }] = await Promise.all([get("degeneracies", { run, step: here.get("step") }), get("cells", { run, whole: true })]);
  if (!current()) return null;
  const { totals } = found;
  const [there, absent] = [found.degeneracies.filter((d) => d.count), found.degeneracies.filter((d) => !d.count)];
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, "Findings"), runPicker(here, runs), stepPicker(here, steps, "all"), h("span", { class: "faint" }, `${number(totals.rollouts)} rollouts in ${number(totals.groups)} groups of ${number(totals.problems)} problems`)),
    h("p", { class: "faint" }, "Each is counted by a filter; a click shows the rollouts that it lets through."),
    h("ul", { class: "findings", "aria-label": "Found" }, there.map((d) => finding(d, run))),
    absent.length ? [h("h2", {}, "Looked for and not found"), h("ul", { class: "absent" }, absent.map((d) => h("li", { title: d.sentence }, d.title, d.ready ? null : h("span", { class: "faint" }, " (so far)"))))] : null,
  );
  return { update: () => current() && document.activeElement?.tagName !== "SELECT" && showFindings(main, { here, runs, current }) };
}

function finding(d, run) {
  const share = d.of ? d.count / d.of : null;
  const target = address("rollouts", [], { run: [run], filter: d.filter, sort: d.sort, descending: d.descending ? "true" : "" });
  return h(
    "li",
    { class: "card finding", dataset: { name: d.name } },
    h("div", { class: "finding-count" }, h("b", {}, number(d.count)), h("span", { class: "faint" }, `${d.count === 1 ? d.unit.replace(/s$/, "") : d.unit}${share === null ? "" : `, ${percent(share)}`}`)),
    h("div", {}, h("h2", {}, d.title), h("p", {}, d.sentence), d.names.length ? h("p", { class: "faint" }, d.names.slice(0, 8).join(", "), d.names.length > 8 ? ` and ${number(d.names.length - 8)} more` : "") : null, d.ready ? null : h("p", { class: "faint" }, "Tokens are still being read; the count may grow."), h("code", { class: "faint" }, d.filter.length > 160 ? `${d.filter.slice(0, 160)}…` : d.filter)),
    h("a", { class: "button", href: target }, `Show ${number(d.rollouts)} ${d.rollouts === 1 ? "rollout" : "rollouts"}`, d.partial ? " (of the first problems)" : ""),
  );
}
