// Metrics of the chosen runs, overlaid; and where their configs differ.

import { bundle, get } from "./api.js";
import { lineChart } from "./charts.js";
import { empty, errorBox, h, number, replace } from "./dom.js";
import { bindKeys } from "./keys.js";
import { address, changed, go } from "./router.js";

const PALETTE = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"].map((c) => `var(${c})`);
const DASHES = [null, "6 3", "2 3", "9 3 2 3"];

export function runColor(name, runs) {
  return PALETTE[Math.max(0, runs.findIndex((r) => r.name === name)) % PALETTE.length];
}

/** Panels that everyone wants. `steps`: columns of the rollouts by step; `metrics`: names or beginnings of names. */
const PANELS = [
  { title: "Reward", steps: ["reward"], labels: [""] },
  { title: "Reward by domain", steps: ["reward"], by: "domain" },
  { title: "Reward by effort", steps: ["reward"], by: "effort" },
  { title: "Length against budget", unit: "tokens", steps: ["sampled_tokens", "thinking_tokens", "budget_tokens", "reference_length"], labels: ["sampled", "thinking", "budget", "reference"] },
  { title: "Health of rewards", unit: "share", steps: ["unscored", "truncated", "zero_variance"], labels: ["not scored", "truncated", "zero variance"] },
  { title: "Staleness", unit: "optimiser steps", steps: ["staleness_mean", "staleness_max"], labels: ["mean", "max"] },
  { title: "Trainer against engine", unit: "|log-prob difference|", metrics: ["rollout/logprob_diff"] },
  { title: "Phase times", unit: "s", metrics: ["time/"], without: ["time/step_s"] },
  { title: "Gradient norm", metrics: ["train/grad_norm"] },
  { title: "Entropy", unit: "nats", metrics: ["entropy", "train/entropy"] },
  { title: "Policy against teacher", metrics: ["teacher/kl", "teacher/disagreement", "teacher/clipped_share"] },
  { title: "Health of the judge", unit: "share", metrics: ["void_rate", "agreement", "order_bias_rate", "first_seat_rate", "over_length"].map((n) => `judge/${n}`) },
  { title: "Work of the judge", unit: "by group", metrics: ["judge/judgements", "judge/judge_tokens"] },
];

export async function showMetrics(main, { here, runs, state, current }) {
  const smooth = Number(here.get("smooth", "0"));
  const wanted = here.get("name");
  const [{ names }, plain, byDomain, byEffort, configs] = await Promise.all([
    get("metrics", { run: runs }),
    get("steps", { run: runs }),
    get("steps", { run: runs, by: "domain" }),
    get("steps", { run: runs, by: "effort" }),
    runs.length > 1 && !bundle ? get("configs", { run: runs }) : null,
  ]);
  if (!current()) return null;
  const context = { runs, state, smooth, steps: { "": table(plain), domain: table(byDomain), effort: table(byEffort) } };
  const needed = names.filter((n) => PANELS.some((p) => belongs(p, n)));
  const values = needed.length ? (await get("metrics", { run: runs, name: needed })).series : {};
  if (!current()) return null;
  const panels = PANELS.map((p) => panel(p, { ...context, values })).filter(Boolean);
  const find = h("input", { type: "search", id: "find-metric", placeholder: "Find a metric…", "aria-label": "Find a metric", value: wanted });
  const rest = h("div", {});
  const draw = () => drawRest(rest, names, find.value, context);
  find.addEventListener("input", () => {
    go(changed({ name: find.value }), { quietly: true });
    draw();
  });
  const slider = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: String(smooth), "aria-label": "Smoothing" });
  slider.addEventListener("change", () => go(changed({ smooth: slider.value === "0" ? "" : slider.value })));
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, "Metrics"), h("label", { class: "inline" }, "Smoothing", slider)),
    panels.length ? h("div", { class: "charts" }, panels) : empty("No step is done yet.", "Charts show up with the first step."),
    configs ? configDifferences(configs) : null,
    names.length ? [h("div", { class: "bar" }, h("h2", {}, "All metrics"), find), rest] : null,
  );
  draw();
  bindKeys({ "/": () => find.focus() });
  let busy = false;
  const update = async () => {
    if (busy || document.activeElement === find || main.querySelector(".readout:not([hidden])")) return;
    busy = true;
    const top = main.parentElement.scrollTop;
    try {
      if (current()) await showMetrics(main, { here, runs, state, current });
      main.parentElement.scrollTop = top;
    } finally {
      busy = false;
    }
  };
  return { update };
}

function belongs(panelOf, name) {
  return panelOf.metrics?.some((m) => name === m || name.startsWith(m.endsWith("/") ? m : `${m}_`)) && !panelOf.without?.includes(name);
}

/** Rows as objects, by run and part. */
function table({ columns, rows }) {
  const found = new Map();
  for (const row of rows) {
    const one = Object.fromEntries(columns.map((c, i) => [c, row[i]]));
    const key = JSON.stringify([one.run, one.part]);
    if (!found.has(key)) found.set(key, { run: one.run, part: one.part, steps: [] });
    found.get(key).steps.push(one);
  }
  return [...found.values()];
}

function panel(p, context) {
  const series = p.steps ? fromSteps(p, context) : fromMetrics(p, context);
  if (!series.length) return null;
  return lineChart({ title: p.title, unit: p.unit, series, smooth: context.smooth, onStep: toRollouts(context.runs) });
}

function toRollouts(runs) {
  return (step) => go(address("rollouts", [], { run: runs, filter: `step = ${step}` }));
}

function fromSteps(p, context) {
  const several = context.runs.length > 1;
  const groups = context.steps[p.by ?? ""];
  const parts = [...new Set(groups.map((g) => g.part))];
  const found = [];
  for (const g of groups) {
    p.steps.forEach((column, c) => {
      const values = g.steps.map((s) => s[column]);
      if (values.every((v) => v === null)) return;
      const label = p.by ? g.part || "(none)" : p.labels[c];
      const kind = p.by ? parts.indexOf(g.part) : c;
      found.push({ name: name(several, g.run, label), steps: g.steps.map((s) => s.step), values, ...look(context, g.run, kind) });
    });
  }
  return p.by && parts.length === 1 && !parts[0] ? [] : found;
}

function fromMetrics(p, context) {
  const several = context.runs.length > 1;
  const names = Object.keys(context.values).filter((n) => belongs(p, n));
  return names.flatMap((metric, i) =>
    Object.entries(context.values[metric]).map(([run, line]) => ({ name: name(several, run, names.length > 1 || !several ? metric.split("/").slice(1).join("/") || metric : ""), ...line, ...look(context, run, i) })),
  );
}

function name(several, run, label) {
  return several ? [run, label].filter(Boolean).join(" · ") : label;
}

/** With one run, colours tell its lines apart; with several, colours are runs and dashes are lines. */
function look({ runs, state }, run, kind) {
  if (runs.length > 1) return { color: runColor(run, state.runs), dash: DASHES[kind % DASHES.length] };
  return { color: PALETTE[kind % PALETTE.length], dash: null };
}

function drawRest(rest, names, wanted, context) {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const found = names.filter((n) => words.every((w) => n.toLowerCase().includes(w)));
  const families = Map.groupBy(found, (n) => n.split("/")[0]);
  replace(
    rest,
    found.length ? null : h("p", { class: "faint" }, "No metric has such a name."),
    [...families].map(([family, members]) => {
      const charts = h("div", { class: "charts" });
      const details = h("details", { class: "family", open: words.length > 0 && found.length <= 12 }, h("summary", {}, family, h("span", { class: "count" }, number(members.length))), charts);
      const load = () => details.open && !charts.childElementCount && drawFamily(charts, members, context);
      details.addEventListener("toggle", load);
      load();
      return details;
    }),
  );
}

async function drawFamily(charts, members, context) {
  try {
    const { series } = await get("metrics", { run: context.runs, name: members });
    replace(
      charts,
      members.map((metric) => {
        const lines = Object.entries(series[metric] ?? {}).map(([run, line]) => ({ name: context.runs.length > 1 ? run : "", ...line, color: runColor(run, context.state.runs) }));
        return lineChart({ title: metric, series: lines, smooth: context.smooth, onStep: toRollouts(context.runs) });
      }),
    );
  } catch (error) {
    replace(charts, errorBox(error));
  }
}

function configDifferences({ runs, rows }) {
  const different = rows.filter((r) => r.differs);
  const cell = (r, i) => h("td", {}, r.set[i] ? h("code", {}, JSON.stringify(r.values[i])) : h("span", { class: "faint" }, "not set"));
  return h(
    "section",
    { class: "configs", "aria-label": "Config differences" },
    h("h2", {}, "Where the configs differ"),
    different.length
      ? h("div", { class: "scroll" }, h("table", { class: "plain" }, h("thead", {}, h("tr", {}, h("th", {}, "key"), runs.map((r) => h("th", {}, r)))), h("tbody", {}, different.map((r) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, r.key)), runs.map((_, i) => cell(r, i)))))))
      : h("p", { class: "faint" }, "They are the same."),
  );
}
