// The shell: runs on the left, views on top, and what the address asks for in the middle.

import { bundle, get } from "./api.js";
import { button, empty, errorBox, h, number, replace } from "./dom.js";
import { showCells } from "./cells.js";
import { showProblems } from "./compare.js";
import { showFindings } from "./findings.js";
import { showGroup } from "./group.js";
import { bindAlways, bindKeys, listenToKeys } from "./keys.js";
import { address, changed, go, place } from "./router.js";
import { showNotes } from "./notes.js";
import { showProblem } from "./problem.js";
import { showRescore } from "./rescore.js";
import { showRollout } from "./rollout.js";
import { runColor, showMetrics } from "./runs.js";
import { showSql } from "./sql.js";
import { showTable } from "./table.js";

const POLL_MS = 1500;
const VIEWS = {
  metrics: ["Metrics", showMetrics],
  rollouts: ["Rollouts", showTable],
  cells: ["Domain × effort", showCells],
  findings: ["Findings", showFindings],
  problems: ["Compare", showProblems],
  notes: ["Notes", showNotes],
  sql: ["SQL", showSql],
  rescore: ["Re-score", showRescore],
  problem: [null, showProblem],
  rollout: [null, showRollout],
  group: [null, showGroup],
};
const BUNDLED = new Set(["metrics", "rollouts", "cells", "rollout", "group"]);
const BELONGS = { rollout: "rollouts", group: "rollouts", problem: "problems" };

const main = h("main", { id: "main", tabindex: "-1" });
const runList = h("nav", { class: "runs", "aria-label": "Runs" });
const tabs = h("nav", { class: "tabs", "aria-label": "Views" });
const banner = h("div", { class: "banners", "aria-live": "polite" });
let state = { version: -1, runs: [], reading: { done: 0, total: 0, derived: 0 }, trouble: "" };
let shown = { leave: null, update: null };
let generation = 0;
let page = "";

function start() {
  document.body.append(
    h("a", { class: "skip", href: "#main", onclick: (e) => (e.preventDefault(), main.focus()) }, "Skip to the content"),
    h(
      "header",
      { class: "top" },
      h("a", { class: "brand", href: "#/metrics" }, h("span", { class: "brand-mark", "aria-hidden": "true" }), "k3rl view"),
      tabs,
      button("?", showHelp, { class: "quiet", "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts (?)" }),
    ),
    h("div", { class: "body" }, h("aside", { class: "side" }, h("h2", {}, "Runs"), runList), h("div", { class: "middle" }, banner, main)),
  );
  listenToKeys();
  bindAlways({ "?": showHelp, g: () => go(address("rollouts", [], { run: place().all("run") })), m: () => go(address("metrics", [], { run: place().all("run") })) });
  window.addEventListener("hashchange", show);
  poll(true);
}

async function poll(first = false) {
  try {
    const fresh = await get("state");
    const news = fresh.version !== state.version;
    const began = fresh.runs.length > 0 && !state.runs.length;
    state = fresh;
    drawSide();
    drawBanner();
    if (first || began) await show();
    else if (news && shown.update) await shown.update(state);
  } catch (error) {
    replace(banner, errorBox(first || error.message !== "Failed to fetch" ? error : new Error("the viewer's server does not answer; is it still running?")));
    if (first) return setTimeout(() => poll(true), POLL_MS);
  }
  if (!bundle) setTimeout(poll, POLL_MS);
}

/** The runs that the address names, or all. */
function chosenRuns() {
  const named = place().all("run");
  return named.length ? named : state.runs.map((r) => r.name);
}

async function show() {
  const here = place();
  const mine = ++generation;
  shown.leave?.();
  shown = { leave: null, update: null };
  bindKeys({});
  const next = [here.view, ...here.parts, here.get("mode")].join("/");
  if (next !== page) main.parentElement.scrollTop = 0;
  page = next;
  drawSide();
  drawTabs(here);
  const [, view] = VIEWS[here.view] ?? [null, null];
  if (!view) return replace(main, empty(`There is no view '${here.view}'.`));
  if (!state.runs.length) return replace(main, empty("No run is here yet.", "Runs show up as soon as they begin to write."));
  try {
    main.setAttribute("aria-busy", "true");
    const found = await view(main, { here, runs: chosenRuns(), state, current: () => mine === generation });
    if (mine === generation && found) shown = found;
  } catch (error) {
    if (mine === generation) replace(main, errorBox(error));
    if (!error.position && !(error instanceof Error && error.message)) throw error;
  } finally {
    if (mine === generation) main.removeAttribute("aria-busy");
  }
}

function drawTabs(here) {
  const current = BELONGS[here.view] ?? here.view;
  replace(
    tabs,
    Object.entries(VIEWS)
      .filter(([name, [label]]) => label && (!bundle || BUNDLED.has(name)))
      .map(([name, [label]]) =>
        h("a", { href: address(name, [], { run: here.all("run") }), "aria-current": name === current ? "page" : null }, label),
      ),
  );
}

function drawSide() {
  const named = place().all("run");
  const names = state.runs.map((r) => r.name);
  const toggle = (name) => {
    const now = new Set(named.length ? named : names);
    if (now.has(name)) now.delete(name);
    else now.add(name);
    const next = names.filter((n) => now.has(n));
    go(changed({ run: next.length === names.length ? [] : next, offset: "" }));
  };
  replace(runList, state.runs.map((run) => runItem(run, !named.length || named.includes(run.name), toggle)));
}

function runItem(run, on, toggle) {
  const steps = run.steps_asked ? `${run.steps_done ?? 0}/${run.steps_asked} steps` : run.steps === 1 ? "1 step" : `${run.steps} steps`;
  return h(
    "label",
    { class: `run ${on ? "" : "off"}`, title: run.reason || run.name },
    h("input", { type: "checkbox", checked: on, onchange: () => toggle(run.name) }),
    h("span", { class: "swatch", style: { background: runColor(run.name, state.runs) }, "aria-hidden": "true" }),
    h(
      "span",
      { class: "run-text" },
      h("span", { class: "run-line" }, h("span", { class: "run-name" }, run.name), run.state && run.state !== "finished" ? h("span", { class: `state state-${run.state}` }, run.state) : null),
      h("span", { class: "run-facts" }, `${steps} · ${number(run.rollouts)} rollouts`),
    ),
  );
}

function drawBanner() {
  const { done, total, derived } = state.reading;
  const notes = [];
  if (done < total) notes.push(h("div", { class: "banner" }, `Reading ${number(done)} of ${number(total)} files…`));
  else if (derived < total) notes.push(h("div", { class: "banner faint" }, `Token statistics: ${number(derived)} of ${number(total)} files…`));
  if (state.trouble) notes.push(h("div", { class: "banner bad", role: "alert" }, state.trouble));
  for (const run of state.runs) {
    if (run.state === "failed") notes.push(h("div", { class: "banner bad" }, `${run.name} failed: ${run.reason}`));
    if (run.unrecorded_step !== null && run.unrecorded_step !== undefined && run.state === "running") {
      notes.push(h("div", { class: "banner" }, `${run.name}: step ${run.unrecorded_step} is being written; its metrics are not there yet.`));
    }
    for (const b of run.broken) {
      notes.push(h("div", { class: "banner bad" }, `${run.name}: ${b.file} cannot be read (${b.reason}). Everything else is shown.`));
    }
  }
  replace(banner, notes);
}

const KEYS = [
  ["j / k, ↓ / ↑", "next, previous row"],
  ["Enter", "open the row"],
  ["n / p", "next, previous rollout (or page of a list)"],
  ["u", "up: from a rollout to its list"],
  ["G", "from a rollout to its group"],
  ["/", "filter"],
  ["← / →", "previous, next token, once one is chosen"],
  ["1 … 6", "what colours the tokens"],
  ["f / b / l", "flag as good, bad, to look at"],
  ["g / m", "rollouts, metrics"],
];

function showHelp() {
  const dialog = h(
    "dialog",
    { class: "help", "aria-label": "Keyboard shortcuts", onclose: (e) => e.target.remove() },
    h("h2", {}, "Keyboard"),
    h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    button("Close", () => dialog.close()),
  );
  document.body.append(dialog);
  dialog.showModal();
}

start();
