// SQL over the columns of all rollouts, for what the filter language cannot ask. The query is part of the address.

import { post } from "./api.js";
import { lineChart } from "./charts.js";
import { button, download, empty, errorBox, h, number, replace } from "./dom.js";
import { columns } from "./filter.js";
import { bindKeys } from "./keys.js";
import { changed, go, problemAddress, rolloutAddress } from "./router.js";

const KEY = ["run", "step", "draw", "sample"];
const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"].map((c) => `var(${c})`);
const EXAMPLES = [
  ["Reward and length by step", "SELECT step, avg(reward) AS reward, avg(thinking_tokens) / avg(budget_tokens) AS of_budget\nFROM everything GROUP BY step ORDER BY step"],
  ["Does thinking pay?", "SELECT effort, quarter, avg(thinking_tokens) AS thinking, avg(reward) AS reward, count(*) AS rollouts\nFROM (SELECT *, ntile(4) OVER (PARTITION BY effort ORDER BY thinking_tokens) AS quarter FROM everything)\nGROUP BY ALL ORDER BY effort, quarter"],
  ["Where groups give signal", "SELECT domain, effort, avg((group_reward_std > 0)::INT) AS with_signal, count(*) AS rollouts\nFROM everything GROUP BY ALL ORDER BY with_signal"],
  ["Largest log-prob differences", "SELECT run, step, draw, sample, logprob_gap_max, staleness_max, reward\nFROM everything ORDER BY logprob_gap_max DESC NULLS LAST LIMIT 50"],
];

export async function showSql(main, { here, current }) {
  const known = await columns();
  if (!current()) return null;
  const text = h("textarea", { class: "sql", rows: 5, spellcheck: "false", "aria-label": "SQL query", placeholder: EXAMPLES[0][1] }, here.get("q"));
  const answer = h("div", { class: "sql-answer", "aria-live": "polite" });
  const run = async () => {
    const query = text.value.trim();
    if (!query) return replace(answer, empty("Write a SELECT, or take an example.", "The tables are everything, rollouts, derived and notes."));
    go(changed({ q: query }), { quietly: true });
    replace(answer, h("p", { class: "faint" }, "Running…"));
    try {
      const found = await post("sql", { query });
      if (current()) replace(answer, result(found));
    } catch (error) {
      if (current()) replace(answer, errorBox(error));
    }
  };
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    run();
  });
  const take = (query) => () => {
    text.value = query;
    run();
  };
  const insert = (name) => () => {
    text.setRangeText(/^[a-z_]\w*$/.test(name) ? name : `"${name}"`, text.selectionStart, text.selectionEnd, "end");
    text.focus();
  };
  const listed = known.filter((c) => c.place !== "file" && !c.name.startsWith("component."));
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, "SQL"), h("span", { class: "faint" }, "One SELECT over the table everything: a row a rollout. It reads only.")),
    h("div", { class: "chips" }, EXAMPLES.map(([name, query]) => button(name, take(query), { class: "chip" }))),
    text,
    h("div", { class: "bar" }, button("Run", run, { class: "primary" }), h("kbd", {}, "Ctrl Enter"), h("details", { class: "menu" }, h("summary", {}, "Columns"), h("div", { class: "menu-body columns-menu left" }, listed.map((c) => button([h("code", {}, c.name), h("span", { class: "faint" }, c.meaning)], insert(c.name), { class: "quiet column" }))))),
    answer,
  );
  bindKeys({ "/": () => text.focus() });
  await run();
  return {};
}

function result({ columns: names, rows, truncated, seconds_s }) {
  const at = Object.fromEntries(names.map((c, i) => [c.name, i]));
  const whole = KEY.every((k) => k in at);
  const keyOf = (row) => Object.fromEntries(KEY.map((k) => [k, row[at[k]]]));
  const cell = (row, value, i) => {
    const name = names[i].name;
    const text = typeof value === "object" && value !== null ? JSON.stringify(value) : typeof value === "number" ? number(value, 4) : value === null ? "–" : String(value);
    if (whole && name === "sample") return h("td", { class: "number" }, h("a", { href: rolloutAddress(keyOf(row)) }, text));
    if (name === "problem_id" && value !== null) return h("td", {}, h("a", { href: problemAddress({ problem_id: value }) }, text));
    return h("td", { class: typeof value === "number" ? "number" : null }, text.length > 300 ? `${text.slice(0, 300)}…` : text);
  };
  return [
    h("div", { class: "bar" }, h("b", {}, number(rows.length)), ` rows in ${number(seconds_s)} s`, truncated ? h("span", { class: "tag warn" }, "cut here: there are more") : null, rows.length ? button("CSV", () => download(new Blob([csv(names, rows)], { type: "text/csv" }), "query.csv")) : null),
    chartOf(names, rows),
    h("div", { class: "scroll" }, h("table", { class: "plain sql-rows", "aria-label": "Rows" }, h("thead", {}, h("tr", {}, names.map((c) => h("th", { scope: "col", title: c.type }, c.name)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((v, i) => cell(row, v, i))))))),
  ];
}

/** A first column `step` that never repeats, and numbers after it: lines. */
function chartOf(names, rows) {
  const steps = rows.map((r) => r[0]);
  if (names[0]?.name !== "step" || rows.length < 2 || new Set(steps).size < steps.length) return null;
  const series = names.slice(1).map((c, i) => ({ name: c.name, color: COLORS[i % COLORS.length], steps, values: rows.map((r) => r[i + 1]) }));
  const numeric = series.filter((s) => s.values.every((v) => v === null || typeof v === "number"));
  return numeric.length ? h("div", { class: "charts" }, lineChart({ title: "By step", series: numeric })) : null;
}

/** What begins like a formula gets an apostrophe: spreadsheets run it otherwise. */
function csv(names, rows) {
  const field = (value) => {
    const text = value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
    const safe = typeof value === "string" && /^[=+\-@\t]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return [names.map((c) => c.name), ...rows].map((row) => row.map(field).join(",")).join("\r\n");
}
