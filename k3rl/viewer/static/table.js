// The table of rollouts: filter, sort, search, page, choose columns, export.

import { bundle, get, getBlob, query } from "./api.js";
import { meter } from "./charts.js";
import { button, download, empty, errorBox, h, number, replace, toast } from "./dom.js";
import { columns, filterBox } from "./filter.js";
import { bindKeys } from "./keys.js";
import { address, changed, go, groupAddress, listParameters, place, rolloutAddress } from "./router.js";
import { runColor } from "./runs.js";
import { viewsMenu } from "./views.js";

const PAGE = 100;
const USUAL = ["step", "problem_id", "domain", "effort", "reward", "advantage", "sampled_tokens", "stop_reason", "fate"];
const SEARCH_AGAIN_MS = 60;

export async function showTable(main, { here, runs, state, current }) {
  const known = await columns(true);
  const names = here.get("columns") ? here.get("columns").split(",") : USUAL;
  const several = runs.length > 1;
  const filter = filterBox({ value: here.get("filter"), onSubmit: (text) => go(changed({ filter: text, offset: "" })) });
  const body = h("tbody", {});
  const facts = h("div", { class: "list-facts", role: "status" });
  const table = h("table", { class: "rollouts", "aria-label": "Rollouts" }, head(names, several, here), body);
  const pages = h("div", { class: "pages" });
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, "Rollouts"), filter.box, searchBox(here), bundle ? null : menu("Views", viewsMenu()), columnMenu(known, names), exportMenu(here), bundle ? null : h("a", { class: "button", href: address("rescore", [], listParameters(here)), title: "Score these again with another reward" }, "Re-score these")),
    quickFilters(known, here),
    facts,
    h("div", { class: "scroll" }, table),
    pages,
  );
  let rows = [];
  let at = -1;
  const load = async () => {
    const parameters = { ...listParameters(here), offset: here.get("offset", "0"), limit: PAGE };
    const page = await get("rollouts", parameters);
    if (!current()) return;
    const keep = rows[at]?.rid;
    rows = page.rows;
    drawRows(body, rows, names, several, here, state);
    drawFacts(facts, page);
    drawPages(pages, page);
    table.classList.toggle("nothing", !rows.length);
    if (!rows.length && page.searching.done >= page.searching.total) replace(body, h("tr", {}, h("td", { colspan: 30 }, nothing(here, state))));
    select(rows.findIndex((r) => r.rid === keep));
    loadExcerpts(body, rows, current);
    if (page.searching.done < page.searching.total) setTimeout(() => current() && load().catch(fail), SEARCH_AGAIN_MS);
  };
  const fail = (error) => {
    if (!current()) return;
    if (error.position !== undefined || /^filter/.test(error.message)) {
      filter.showError(error);
      replace(body);
      replace(facts);
    } else replace(body, h("tr", {}, h("td", { colspan: 30 }, errorBox(error))));
  };
  const select = (next) => {
    body.children[at]?.classList.remove("selected");
    at = next;
    const row = body.children[at];
    if (!row || !rows[at]) return;
    row.classList.add("selected");
    row.querySelector("a")?.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  };
  const step = (by) => rows.length && select(Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by)));
  const turn = (by) => pages.querySelector(by > 0 ? ".page-next:not([disabled])" : ".page-previous:not([disabled])")?.click();
  bindKeys({
    j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
    Enter: () => rows[at] && go(rolloutAddress(rows[at], listParameters(here))),
    n: () => turn(1), p: () => turn(-1), "/": () => filter.input.focus(),
  });
  try {
    await load();
  } catch (error) {
    fail(error);
  }
  return { update: () => load().catch(fail) };
}

function nothing(here, state) {
  if (here.get("filter")) return empty("No rollout is like that.", "The filter or the choice of runs lets none through.");
  if (state.reading.done < state.reading.total) return empty("Rollouts are being read…");
  return empty("This run has no rollouts yet.", "They show up when its first step is done.");
}

function head(names, several, here) {
  const [sort, descending] = [here.get("sort"), here.get("descending") !== ""];
  const header = (name) => {
    const on = sort === name;
    // first click: best or largest first; second: the other way round; third: as it was
    const next = !on ? { sort: name, descending: "true" } : descending ? { sort: name, descending: "" } : { sort: "", descending: "" };
    return h(
      "th",
      { scope: "col", "aria-sort": on ? (descending ? "descending" : "ascending") : "none" },
      button([label(name), h("span", { class: "arrow", "aria-hidden": "true" }, on ? (descending ? "▼" : "▲") : "")], () => go(changed({ ...next, offset: "" }))),
    );
  };
  return h("thead", {}, h("tr", {}, several ? h("th", { scope: "col" }, "run") : null, h("th", { scope: "col" }, "rollout"), names.map(header), h("th", { scope: "col", class: "wide" }, "question and answer")));
}

export function label(name) {
  return name.replace(/^component\./, "").replaceAll("_", " ");
}

function drawRows(body, rows, names, several, here, state) {
  const list = listParameters(here);
  const rewards = rows.map((r) => r.reward).filter((v) => typeof v === "number");
  const range = [Math.min(0, ...rewards), Math.max(1e-9, ...rewards)];
  replace(
    body,
    rows.map((row) =>
      h(
        "tr",
        { dataset: { rid: row.rid }, onclick: (e) => e.target.closest("a, button") || String(getSelection()) || go(rolloutAddress(row, list)) },
        several ? h("td", {}, h("span", { class: "swatch", style: { background: runColor(row.run, state.runs) } }), row.run) : null,
        h("td", { class: "key-cell" }, h("a", { href: rolloutAddress(row, list) }, `${row.draw}.${row.sample}`), flagMark(row), h("a", { class: "quiet group-link", href: groupAddress(row, list), title: "Its group", "aria-label": `Group ${row.draw}` }, "≡")),
        names.map((name) => cell(row, name, range)),
        h("td", { class: "wide" }, h("span", { class: "question" }), h("span", { class: "answer" })),
      ),
    ),
  );
}

export function flagMark(row) {
  if (!row.flag && !row.note) return null;
  const sign = { good: "✓", bad: "✗", look: "◉" }[row.flag] ?? "✎";
  return h("span", { class: `flag flag-${row.flag ?? "note"}`, title: row.note ?? row.flag }, sign);
}

function cell(row, name, range) {
  const value = name.startsWith("component.") ? row.reward_components?.[name.slice(10)] : row[name];
  if (name === "reward") {
    if (value === null) return h("td", { class: "number" }, h("span", { class: "tag warn", title: "not scored" }, row.reward_outcome ?? "none"));
    return h("td", { class: "number" }, meter(value, range), h("span", { class: "fixed" }, number(value)));
  }
  if (name === "reward_components") return h("td", {}, Object.entries(value ?? {}).map(([k, v]) => h("span", { class: "tag" }, `${k} ${number(v)}`)));
  if (name === "advantage") return h("td", { class: `number ${value > 0 ? "positive" : value < 0 ? "negative" : ""}` }, number(value));
  if (name === "stop_reason" || name === "status" || name === "reward_outcome" || name === "fate") return h("td", {}, value ? h("span", { class: `tag ${tone(value)}` }, value) : "–");
  if (typeof value === "number") return h("td", { class: "number" }, number(value));
  return h("td", { class: "clip", title: value === null ? null : String(value) }, value === null || value === undefined ? "–" : String(value));
}

export function tone(value) {
  if (/^(end_of_turn|complete|scored|trained|stop_tool|stop_string)$/.test(value)) return "";
  if (/error|failed|timed_out|aborted|dropped/.test(value)) return "bad";
  return "warn";
}

async function loadExcerpts(body, rows, current) {
  if (!rows.length) return;
  const said = await get("excerpts", { rid: rows.map((r) => r.rid) });
  if (!current()) return;
  for (const row of body.children) {
    const found = said[row.dataset.rid];
    if (!found) continue;
    row.querySelector(".question").textContent = found.question;
    row.querySelector(".answer").textContent = found.answer;
  }
}

function drawFacts(facts, page) {
  const { done, total } = page.searching;
  const partial = done < total ? ` so far; searching texts, ${number(done)} of ${number(total)} files` : "";
  replace(facts, h("b", {}, number(page.total)), page.total === 1 ? " rollout" : " rollouts", partial, partial ? h("progress", { max: total, value: done }) : null);
}

function drawPages(pages, page) {
  const last = Math.max(0, Math.ceil(page.total / PAGE) - 1);
  const now = Math.floor(page.offset / PAGE);
  const to = (n) => go(changed({ offset: n ? n * PAGE : "" }));
  if (last === 0) return replace(pages);
  return replace(
    pages,
    button("← previous", () => to(now - 1), { class: "page-previous", disabled: now === 0 }),
    h("span", {}, `page ${number(now + 1)} of ${number(last + 1)}`),
    button("next →", () => to(now + 1), { class: "page-next", disabled: now >= last }),
  );
}

function searchBox(here) {
  const input = h("input", { type: "search", class: "search-input", placeholder: "Search texts…", "aria-label": "Search all texts" });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !input.value.trim()) return;
    const term = `text ~ "${input.value.trim().replace(/[\\"]/g, "\\$&")}"`;
    const before = here.get("filter");
    go(changed({ filter: before ? `(${before}) and ${term}` : term, offset: "" }));
  });
  return bundle ? null : input;
}

/** One click for the commonest questions. */
function quickFilters(known, here) {
  const now = here.get("filter");
  const chip = (column, value) => {
    const term = `${column} = "${value}"`;
    const on = now.includes(term);
    const without = now.split(" and ").filter((t) => t !== term).join(" and ");
    const next = on ? without : now ? (/\bor\b/i.test(now) ? `(${now}) and ${term}` : `${now} and ${term}`) : term;
    return button(value, () => go(changed({ filter: next, offset: "" })), { class: `chip ${on ? "on" : ""}`, "aria-pressed": String(on) });
  };
  const facets = ["domain", "effort", "stop_reason", "fate", "reward_outcome"];
  const groups = facets.map((name) => known.find((c) => c.name === name)).filter((c) => c?.values?.length > 1 && c.values.length <= 8);
  if (!groups.length || bundle) return null;
  return h("div", { class: "chips" }, groups.map((c) => h("span", { class: "chip-group", role: "group", "aria-label": label(c.name) }, h("span", { class: "faint" }, label(c.name)), c.values.map((v) => chip(c.name, v)))));
}

function columnMenu(known, names) {
  const offered = known.filter((c) => c.place !== "file" && !["run", "draw", "sample"].includes(c.name));
  const box = (c) => h("label", { title: c.meaning }, h("input", { type: "checkbox", checked: names.includes(c.name), value: c.name }), label(c.name));
  const list = h("div", { class: "menu-body columns-menu" }, offered.map(box));
  list.addEventListener("change", () => {
    const ticked = [...list.querySelectorAll("input:checked")].map((i) => i.value);
    const next = [...names.filter((n) => ticked.includes(n)), ...ticked.filter((n) => !names.includes(n))];
    go(changed({ columns: next.join(",") === USUAL.join(",") ? "" : next.join(",") }));
  });
  return menu("Columns", list);
}

export function menu(name, ...content) {
  const details = h("details", { class: "menu" }, h("summary", {}, name), ...content);
  details.addEventListener("focusout", (e) => e.relatedTarget && !details.contains(e.relatedTarget) && (details.open = false));
  return details;
}

const FORMATS = [
  ["parquet", "Parquet, as stored", "parquet"],
  ["jsonl", "JSON lines", "jsonl"],
  ["csv", "CSV, without tokens", "csv"],
  ["datasets", "datasets folder, zipped", "zip"],
];

export function exportMenu(here) {
  const fetchIt = async (format, ending) => {
    toast("Preparing the file…");
    try {
      download(await getBlob("export", { ...listParameters(here), format }), `rollouts.${ending}`);
    } catch (error) {
      toast(error.message);
    }
  };
  if (bundle) return null;
  return menu(
    "Export",
    h(
      "div",
      { class: "menu-body" },
      h("p", { class: "faint" }, "Everything that the filter lets through:"),
      FORMATS.map(([format, name, ending]) => button(name, () => fetchIt(format, ending), { dataset: { format } })),
    ),
  );
}

export function selectionQuery() {
  return query(listParameters(place()));
}
