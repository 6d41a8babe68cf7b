// What a static bundle answers in the server's place.

const element = document.getElementById("bundle");
export const bundle = element ? JSON.parse(element.textContent) : null;
const answers = new Map(bundle?.answers.map(([path, parameters, answer]) => [asked(path, parameters), answer]));

/** One question, whatever the order of its parameters and whether they are numbers or words. */
function asked(path, parameters) {
  const given = Object.entries(parameters).filter(([, v]) => v !== null && v !== undefined && v !== "" && v !== false);
  return JSON.stringify([path, given.map(([name, value]) => [name, String(value)]).sort()]);
}

/** Throws an Error where the bundle does not hold the answer. */
export function fromBundle(path, parameters) {
  const one = PARTS[path];
  return one ? one(parameters) : kept(path, parameters);
}

const PARTS = {
  rollout: bundledRollout,
  group: bundledGroup,
  rollouts: bundledPage,
  neighbours: bundledNeighbours,
  excerpts: () => bundle.excerpts,
  metrics: bundledMetrics,
  steps: bundledSteps,
  cells: bundledCells,
};

function kept(path, parameters) {
  const found = answers.get(asked(path, parameters));
  if (!found) throw new Error("this part is not in a static bundle");
  return found;
}

// -- runs, each kept by itself -----------------------------------------------------------------------------

function bundledMetrics({ run, name = [] }) {
  const runs = run.map((r) => [r, kept("metrics", { run: r }).series]);
  if (!name.length) return { names: [...new Set(runs.flatMap(([, series]) => Object.keys(series)))].sort() };
  const lines = (n) => Object.fromEntries(runs.filter(([, series]) => n in series).map(([r, series]) => [r, series[n][r]]));
  return { series: Object.fromEntries(name.map((n) => [n, lines(n)])) };
}

function bundledSteps({ run, by = "" }) {
  const found = run.map((r) => kept("steps", { run: r, by }));
  return { columns: found[0]?.columns ?? [], rows: found.flatMap((f) => f.rows) };
}

function bundledCells({ run, step = "", whole = false }) {
  const together = kept("cells", { run, whole: true });
  if (whole) return together;
  const { steps } = together;
  return { ...kept("cells", { run, step: step || (steps.at(-1) ?? "") }), steps };
}

// -- rollouts ----------------------------------------------------------------------------------------------

function keyOf(p) {
  return JSON.stringify([p.run, p.step, p.draw, p.sample].map(String));
}

function bundledRollout(parameters) {
  const found = bundle.rollouts.find((r) => keyOf(r.row) === keyOf(parameters));
  if (!found) throw new Error("this rollout is not in the bundle");
  return found;
}

function bundledGroup(parameters) {
  return { samples: bundle.rollouts.filter((r) => ["run", "step", "draw"].every((k) => String(r.row[k]) === String(parameters[k]))) };
}

const TERM = /^\(?\s*([\w.]+)\s*(?:(=|!=|<=|>=|<|>)\s*("(?:[^"\\]|\\.)*"|[^\s"()]+)|(is null))\s*\)?$/i;
const COMPARE = { "=": (a, b) => a === b, "!=": (a, b) => a !== b, "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };

function valueOf(row, name) {
  return (name.startsWith("component.") ? row.reward_components?.[name.slice(10)] : row[name]) ?? null;
}

/** A test of a whole rollout: comparisons of columns joined by `and`; anything else is words to look for. */
function accepts(filter) {
  const terms = filter.split(/\s+and\s+/i).map((term) => TERM.exec(term.trim()));
  const known = bundle.rollouts[0]?.row ?? {};
  if (terms.every((t) => t && (t[1] in known || t[1].startsWith("component.")))) return ({ row }) => terms.every((t) => holds(row, t));
  const words = filter.replace(/^text ~ /, "").toLowerCase().replaceAll('"', "");
  return (r) => JSON.stringify([r.row, r.texts]).toLowerCase().includes(words);
}

function holds(row, [, name, comparison, word, isNull]) {
  const value = valueOf(row, name);
  if (isNull || value === null) return Boolean(isNull) && value === null;
  const text = word.startsWith('"') ? JSON.parse(word) : word;
  return COMPARE[comparison](typeof value === "number" ? value : String(value), typeof value === "number" ? Number(text) : text);
}

function bundledRows({ run = [], filter = "", sort = "", descending = false }) {
  const accepted = filter ? accepts(filter) : () => true;
  const found = bundle.rollouts.filter((r) => (!run.length || run.includes(r.row.run)) && accepted(r)).map((r) => r.row);
  if (!sort) return found;
  const sign = descending ? -1 : 1;
  return found.toSorted((a, b) => {
    const [x, y] = [valueOf(a, sort), valueOf(b, sort)];
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  });
}

function bundledPage(parameters) {
  const rows = bundledRows(parameters);
  const { offset = 0, limit = 100 } = parameters;
  const from = Number(offset);
  return { rows: rows.slice(from, from + limit), total: rows.length, offset: from, searching: { done: 1, total: 1 } };
}

function bundledNeighbours(parameters) {
  const rows = bundledRows(parameters);
  const at = rows.findIndex((r) => keyOf(r) === keyOf({ ...parameters, run: parameters.of_run }));
  const place = at < 0 ? null : at + 1;
  return { place, previous: at > 0 ? rows[at - 1] : null, next: at < 0 ? null : (rows[at + 1] ?? null) };
}
