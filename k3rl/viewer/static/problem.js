// One problem over steps and runs: how its rewards spread at each draw, and any two of its rollouts against each other.

import { get } from "./api.js";
import { lineChart } from "./charts.js";
import { h, number, percent, replace } from "./dom.js";
import { longText } from "./reading.js";
import { address, changed, go, groupAddress, place, rolloutAddress } from "./router.js";
import { runColor } from "./runs.js";

export async function showProblem(main, { here, runs, state, current }) {
  const [problem] = here.parts;
  const { question, points } = await get("compare", { problem_id: problem, run: runs });
  if (!current()) return null;
  const [a, b] = chosenPair(here, points);
  const pair = h("section", { class: "pair", "aria-label": "Two rollouts" });
  replace(
    main,
    h("div", { class: "bar" }, h("nav", { class: "crumbs", "aria-label": "Where this is" }, h("a", { href: address("problems", [], { run: here.all("run") }) }, "Compare"), " / "), h("h1", {}, problem), h("a", { class: "button", href: address("rollouts", [], { run: here.all("run"), filter: `problem_id = ${JSON.stringify(problem)}`, sort: "step" }) }, "All its rollouts")),
    question ? h("article", { class: "bubble message" }, h("header", {}, "question"), h("div", { class: "bubble-body" }, longText(question))) : null,
    h("div", { class: "problem-top" }, distribution(points, runs, state), draws(points, state, a, b)),
    pair,
  );
  await drawPair(pair, a, b);
  return { update: () => current() && !main.contains(document.activeElement) && showProblem(main, { here: place(), runs, state, current }) };
}

/** A key as the address writes it, and back. */
function written(key) {
  return [key.run, key.step, key.draw, key.sample].join(" ");
}

function keyOf(text) {
  const parts = text.split(" ");
  if (parts.length < 4) return null;
  const [step, draw, sample] = parts.slice(-3).map(Number);
  return { run: parts.slice(0, -3).join(" "), step, draw, sample };
}

/** What the address names; else the first sample of the first draw and of the last. */
function chosenPair(here, points) {
  const a = keyOf(here.get("a")) ?? { ...points[0], sample: 0 };
  const last = points.findLast((p) => p.run !== a.run || p.step !== a.step || p.draw !== a.draw);
  const otherwise = last ? { ...last, sample: 0 } : { ...points[0], sample: points[0].rewards.length > 1 ? 1 : 0 };
  return [a, keyOf(here.get("b")) ?? otherwise];
}

function distribution(points, runs, state) {
  const series = runs
    .map((run) => ({ run, own: points.filter((p) => p.run === run) }))
    .filter(({ own }) => own.length)
    .map(({ run, own }) => ({ name: runs.length > 1 ? run : "mean", color: runColor(run, state.runs), steps: own.map((p) => p.step), values: own.map((p) => p.reward_mean), clouds: own.map((p) => p.rewards.filter((r) => r !== null)) }));
  return lineChart({ title: "Rewards at each draw", unit: "mean as a line, samples as dots", series, onStep: (step) => go(address("rollouts", [], { run: runs, filter: `problem_id = ${JSON.stringify(place().parts[0])} and step = ${step}` })) });
}

function draws(points, state, a, b) {
  const line = (p) =>
    h(
      "tr",
      {},
      h("td", {}, h("span", { class: "swatch", style: { background: runColor(p.run, state.runs) }, "aria-hidden": "true" }), p.run),
      h("td", {}, h("a", { href: groupAddress(p) }, `step ${p.step}`)),
      h("td", {}, number(p.reward_mean)),
      h("td", {}, number(p.sampled_mean, 0)),
      h("td", {}, percent(p.truncated_share)),
      h("td", {}, h("div", { class: "dots" }, p.rewards.map((reward, sample) => dot({ ...p, sample }, reward, a, b)))),
    );
  const heads = ["run", "group", "reward", "tokens", "truncated", "samples"];
  return h("div", {}, h("p", { class: "faint" }, "A click puts a sample on side A below, a click with Shift on side B."), h("div", { class: "scroll draws-table" }, h("table", { class: "plain small", "aria-label": "Draws" }, h("thead", {}, h("tr", {}, heads.map((n) => h("th", { scope: "col" }, n)))), h("tbody", {}, points.map(line)))));
}

function dot(key, reward, a, b) {
  const side = written(key) === written(a) ? "A" : written(key) === written(b) ? "B" : "";
  const choose = (event) => go(changed({ [event.shiftKey ? "b" : "a"]: written(key), ...(event.shiftKey ? { a: written(a) } : { b: written(b) }) }));
  return h("button", { type: "button", class: `chip ${side ? "on" : ""}`, "aria-label": `Sample ${key.sample} of step ${key.step} in ${key.run}, reward ${number(reward)}${side ? `, side ${side}` : ""}`, onclick: choose, dataset: { sample: key.sample } }, side ? `${side} ` : "", number(reward, 2));
}

async function drawPair(section, a, b) {
  const sides = Object.fromEntries([["a", a], ["b", b]].flatMap(([side, key]) => ["run", "step", "draw", "sample"].map((n) => [`${side}_${n}`, key[n]])));
  const found = await get("compare/pair", sides);
  const where = found.same
    ? "The responses are the same, letter by letter."
    : `They part at character ${number(found.parts_at_character)}${found.parts_at_token === null ? "" : `, token ${number(found.parts_at_token)}`}.`;
  replace(
    section,
    h("h2", {}, "Where two rollouts part"),
    h("p", {}, where, found.same_prompt ? "" : h("span", { class: "tag warn" }, "their prompts differ")),
    found.common && !found.same ? h("div", { class: "diverging shared common", "aria-label": "What they share" }, `…${found.common.slice(-300)}`) : null,
    h("div", { class: "samples" }, found.sides.map((side, i) => column(side, "AB"[i], found))),
  );
}

function column({ row, after, characters, tokens, token }, name, { same, common, parts_at_token }) {
  const link = rolloutAddress(row, parts_at_token === null ? {} : { mode: "tokens", token: Math.min(parts_at_token, Math.max(0, tokens - 1)) });
  return h(
    "article",
    { class: "sample", "aria-label": `Side ${name}` },
    h(
      "header",
      {},
      h("div", { class: "sample-line" }, h("b", {}, name), h("a", { class: "sample-open", href: link }, `${row.run}, step ${row.step}, ${row.draw}.${row.sample}`)),
      h("div", { class: "sample-line" }, h("span", {}, "reward ", h("b", {}, number(row.reward))), h("span", { class: "faint" }, `${number(tokens)} tokens, ${number(characters)} characters`)),
      token ? h("div", { class: "sample-line faint" }, "goes on with ", h("code", { class: "piece" }, JSON.stringify(token.text)), ` id ${token.id}`) : null,
    ),
    h("div", { class: "diverging" }, same ? common : after || h("span", { class: "diverges" }, "ends here")),
  );
}
