// What is known of a rollout besides its text: reward, lengths, segments, judge, sandbox, times.

import { meter } from "./charts.js";
import { h, number, percent, replace } from "./dom.js";
import { longText, segments } from "./reading.js";
import { tone } from "./table.js";

const SEGMENTS = 200;
const BAR = 290;
const SHOWN = new Set(["rid", "run", "step", "draw", "sample", "reward", "reward_components", "reward_outcome", "advantage", "flag", "note", "problem_id", "domain", "effort", "status", "stop_reason", "fate", "error", "sampled_tokens", "thinking_tokens", "budget_tokens", "reference_length", "group_reward_mean", "group_reward_std", "group_size"]);

export function factsPanel(whole, { onToken }) {
  return h("aside", { class: "facts", "aria-label": "Facts" }, [
    rewardCard(whole),
    lengthCard(whole.row),
    segmentCard(whole, onToken),
    judgeCard(whole.traces.judge_trace),
    tree("Sandbox", whole.traces.sandbox),
    timesCard(whole.traces.timings),
    restCard(whole),
  ]);
}

function card(title, ...body) {
  return h("section", { class: "card" }, h("h3", {}, title), body);
}

function rewardCard({ row, texts }) {
  const parts = Object.entries(row.reward_components ?? {});
  const range = [Math.min(0, ...parts.map(([, v]) => v)), Math.max(1e-9, ...parts.map(([, v]) => v))];
  const { of, rest } = explanations(texts.reward_explanation, parts.map(([name]) => name));
  const line = ([name, value]) => [h("div", { class: "component" }, h("span", { title: name }, name), meter(value, range, `${name}: ${number(value)}`), h("b", {}, number(value))), of.has(name) ? h("div", { class: "explained" }, longText(of.get(name))) : null];
  return card(
    "Reward",
    h("div", { class: "big" }, row.reward === null ? h("span", { class: "tag bad" }, row.reward_outcome ?? "not scored") : number(row.reward, 4), row.advantage === null ? null : h("span", { class: `advantage ${row.advantage > 0 ? "positive" : row.advantage < 0 ? "negative" : ""}` }, `advantage ${row.advantage > 0 ? "+" : ""}${number(row.advantage, 4)}`)),
    parts.map(line),
    rest ? h("div", { class: "explanation" }, longText(rest)) : null,
    row.group_size > 1 ? h("p", { class: "faint" }, `group of ${row.group_size}: mean ${number(row.group_reward_mean)}, spread ${number(row.group_reward_std)}`) : null,
  );
}

/** Explanations are written as `part: why`, a part a line; lines that name no part belong to the one before. */
export function explanations(text, names) {
  const of = new Map();
  const rest = [];
  let now = null;
  for (const line of (text ?? "").split("\n")) {
    const named = names.find((name) => line.startsWith(`${name}: `));
    if (named) of.set((now = named), line.slice(named.length + 2));
    else if (now) of.set(now, `${of.get(now)}\n${line}`);
    else if (line) rest.push(line);
  }
  return { of, rest: rest.join("\n") };
}

function lengthCard(row) {
  const budget = row.budget_tokens;
  const most = Math.max(row.sampled_tokens ?? 0, budget ?? 0, row.reference_length ?? 0);
  const line = (name, value, kind = "") => (value === null || value === undefined ? null : h("div", { class: `component ${kind}` }, h("span", {}, name), meter(value, [0, most], `${name}: ${number(value)} tokens`), h("b", {}, number(value))));
  return card(
    "Length",
    line("sampled", row.sampled_tokens),
    line("thinking", row.thinking_tokens),
    line("budget", budget, "limit"),
    line("reference", row.reference_length, "limit"),
    budget ? h("p", { class: "faint" }, `${percent(row.sampled_tokens / budget)} of the budget`) : null,
    h("div", {}, row.stop_reason ? h("span", { class: `tag ${tone(row.stop_reason)}` }, row.stop_reason) : null, [row.status, row.fate].filter(Boolean).map((word) => h("span", { class: `tag ${tone(word)}` }, word))),
    row.error ? h("p", { class: "bad-text" }, row.error) : null,
  );
}

function segmentCard({ tokens, row }, onToken) {
  const parts = segments(tokens);
  if (!parts.length) return null;
  const stale = row.staleness_max === null ? null : h("p", { class: "faint" }, `staleness: mean ${number(row.staleness_mean)}, max ${number(row.staleness_max)}; begun in step ${row.started_step}, done in step ${row.finished_step}`);
  const body = h("tbody", {});
  const more = h("button", { type: "button", class: "quiet", onclick: () => lines(parts.length) }, `All ${number(parts.length)}`);
  const lines = (count) => {
    replace(body, parts.slice(0, count).map((s, i) => segmentLine(s, resumedBefore(parts, i), onToken)));
    more.hidden = count >= parts.length;
  };
  const table = h("details", { open: parts.length <= 8, ontoggle: () => table.open && !body.childElementCount && lines(SEGMENTS) }, h("summary", {}, `${number(parts.length)} segments`), h("table", { class: "plain small" }, body), more);
  if (table.open) lines(SEGMENTS);
  return card("Segments", segmentBar(parts), stale, table);
}

/** As many pieces as the bar has pixels, at most. */
function segmentBar(parts) {
  const total = parts.at(-1).end;
  const shown = [];
  let at = 0;
  for (let x = 0; x < BAR && at < parts.length; x++) {
    const token = ((x + 0.5) * total) / BAR;
    while (at < parts.length - 1 && parts[at].end <= token) at++;
    const last = shown.at(-1);
    if (last?.part === parts[at]) last.width++;
    else shown.push({ part: parts[at], width: 1 });
  }
  return h("div", { class: "segment-bar", role: "img", "aria-label": `${parts.length} segments` }, shown.map(({ part, width }) => h("span", { class: `seg ${part.channel} ${part.sampled ? "" : "given"}`, style: { width: `${(100 * width) / BAR}%` }, title: `${part.channel}, ${part.end - part.start} tokens` })));
}

/** Was a segment sampled by other weights than what the policy said before it? */
function resumedBefore(parts, i) {
  if (!parts[i].sampled) return false;
  for (let j = i - 1; j >= 0; j--) if (parts[j].sampled) return parts[j].version !== parts[i].version;
  return false;
}

function segmentLine(s, resumed, onToken) {
  return h("tr", {}, h("td", {}, h("button", { type: "button", class: "quiet link", onclick: () => onToken(s.start) }, `${s.start}–${s.end - 1}`)), h("td", {}, s.channel.replace("_", " ")), h("td", {}, s.sampled ? (s.version === null ? "sampled" : `v${s.version}`) : "given"), h("td", {}, resumed ? h("span", { class: "tag warn" }, "resumed") : ""));
}

/** A judge's trace: rubric, scorepad and pair results where it has them, everything else as a tree. */
function judgeCard(trace) {
  if (trace === null || trace === undefined) return null;
  if (typeof trace !== "object" || Array.isArray(trace)) return tree("Judge", trace);
  const { rubric, scorepad, pairs, judgements, ...rest } = trace;
  return card(
    "Judge",
    Array.isArray(rubric) ? h("table", { class: "plain small" }, h("thead", {}, h("tr", {}, ["criterion", "weight", "score"].map((n) => h("th", {}, n)))), h("tbody", {}, rubric.map(criterion))) : rubric ? treeNode("rubric", rubric) : null,
    scorepad ? h("details", {}, h("summary", {}, "Scorepad"), typeof scorepad === "string" ? longText(scorepad) : treeNode("scorepad", scorepad)) : null,
    Array.isArray(pairs) ? h("details", { open: true }, h("summary", {}, `${pairs.length} pairs`), h("ul", { class: "pairs" }, pairs.map(pair))) : null,
    Array.isArray(judgements) ? judgements.map((j, i) => judgement(j, i, trace.candidate)) : null,
    Object.keys(rest).length ? treeNode("more", rest) : null,
  );
}

function criterion(c) {
  if (typeof c !== "object" || c === null) return h("tr", {}, h("td", { colspan: 3 }, String(c)));
  return [h("tr", {}, h("td", {}, c.name ?? c.criterion ?? "–"), h("td", { class: "number" }, number(c.weight)), h("td", { class: "number" }, number(c.score))), c.reason ? h("tr", {}, h("td", { colspan: 3, class: "faint" }, c.reason)) : null];
}

/** One sitting of the judge: what it wrote down for each side, and every step it took. */
function judgement(j, i, candidate) {
  if (typeof j !== "object" || j === null) return h("div", {}, String(j));
  const sides = Object.entries(j.scores ?? {}).map(([side, scores]) => {
    const who = { A: j.first, B: j.second }[side];
    const why = j.justifications?.[side];
    return h("div", { class: "judged" }, h("b", {}, `${side}${who === undefined ? "" : `, sample ${who}`}${who === candidate ? " (this one)" : ""}`), h("div", {}, Object.entries(scores ?? {}).map(([name, score]) => h("span", { class: "fact" }, `${name} `, h("b", {}, number(score)), " "))), why ? h("div", { class: "faint" }, longText(typeof why === "string" ? why : JSON.stringify(why))) : null);
  });
  const { scores, justifications, ...more } = j;
  const title = j.first === undefined ? `judgement ${i + 1}` : `${j.first} against ${j.second}`;
  return h("details", { class: "judgement" }, h("summary", {}, title, j.stage && j.stage !== "recorded" ? h("span", { class: "tag warn" }, j.stage) : null), sides, treeNode("how", more));
}

function pair(p) {
  if (typeof p !== "object" || p === null || !("winner" in p)) return h("li", {}, typeof p === "string" ? p : JSON.stringify(p));
  const flipped = p.swapped !== undefined && p.swapped !== p.winner;
  return h("li", {}, `${p.a ?? "a"} against ${p.b ?? "b"}: `, h("b", {}, String(p.winner)), p.swapped === undefined ? null : h("span", { class: `tag ${flipped ? "warn" : ""}` }, flipped ? `with seats swapped: ${p.swapped}` : "same with seats swapped"), p.reason ? h("div", { class: "faint" }, p.reason) : null);
}

function tree(title, value) {
  return value === null || value === undefined ? null : card(title, treeNode("", value, true));
}

function treeNode(name, value, open = false) {
  if (typeof value !== "object" || value === null) return h("div", { class: "leaf" }, name ? h("span", { class: "faint" }, `${name}: `) : null, String(value));
  const entries = Object.entries(value);
  if (entries.length && entries.length <= 12 && open) return h("div", { class: "branch" }, entries.map(([k, v]) => treeNode(k, v)));
  return h("details", { class: "branch" }, h("summary", {}, `${name || "all"} (${entries.length})`), entries.map(([k, v]) => treeNode(k, v)));
}

function timesCard(times) {
  const entries = Object.entries(times ?? {}).filter(([, v]) => typeof v === "number");
  if (!entries.length) return null;
  const most = Math.max(...entries.map(([, v]) => v));
  return card("Times", entries.map(([name, v]) => h("div", { class: "component" }, h("span", {}, name.replace(/_s$/, "")), meter(v, [0, most], `${name}: ${number(v)} seconds`), h("b", {}, `${number(v, 2)} s`))));
}

function restCard({ row, extra, file }) {
  const known = Object.entries({ ...row, ...extra }).filter(([k, v]) => !SHOWN.has(k) && v !== null && v !== "");
  return card("Everything else", h("dl", { class: "rest" }, [...known, ["file", file]].map(([k, v]) => [h("dt", {}, k), h("dd", {}, typeof v === "object" ? JSON.stringify(v) : typeof v === "number" ? number(v, 5) : String(v))])));
}
