// The server's answers; in a static bundle, the answers that it carries.

const bundled = document.getElementById("bundle");
export const bundle = bundled ? JSON.parse(bundled.textContent) : null;

export function query(parameters) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "" && one !== false) search.append(name, one);
    }
  }
  return search.toString();
}

/** GET. Throws an Error with the server's sentence; `position` tells where in a filter the trouble is. */
export async function get(path, parameters = {}, signal = undefined) {
  const search = query(parameters);
  if (bundle) return fromBundle(path, parameters);
  return answer(await fetch(`/api/${path}${search ? `?${search}` : ""}`, { signal }));
}

export async function post(path, body) {
  if (bundle) throw new Error("a static bundle cannot be changed");
  const headers = { "Content-Type": "application/json", "X-K3RL": "1" };
  return answer(await fetch(`/api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

/** A file the server makes. */
export async function getBlob(path, parameters) {
  const response = await fetch(`/api/${path}?${query(parameters)}`);
  if (!response.ok) await answer(response);
  return response.blob();
}

async function answer(response) {
  let body;
  try {
    body = await response.json();
  } catch {
    throw new Error(`the viewer's server answered ${response.status} with something that is not JSON`);
  }
  if (!response.ok) throw Object.assign(new Error(body.error ?? `error ${response.status}`), { position: body.position });
  return body;
}

function fromBundle(path, parameters) {
  const one = (p) => [p.run, p.step, p.draw, p.sample].join("\x1f");
  if (path === "rollout") {
    const found = bundle.rollouts.find((r) => one(r.row) === one(parameters));
    if (!found) throw new Error("this rollout is not in the bundle");
    return found;
  }
  if (path === "group") {
    const wanted = (r) => ["run", "step", "draw"].every((k) => String(r.row[k]) === String(parameters[k]));
    return { samples: bundle.rollouts.filter(wanted) };
  }
  if (path === "rollouts") return bundledPage(parameters);
  if (path === "neighbours") return bundledNeighbours(parameters, one);
  if (path === "excerpts") return bundle.excerpts;
  if (path in bundle.answers) return bundle.answers[path];
  throw new Error("this part is not in a static bundle");
}

function bundledRows({ filter = "", sort = "", descending = false }) {
  const words = filter.toLowerCase().replaceAll('"', "");
  const rows = bundle.rollouts.filter((r) => !words || JSON.stringify([r.row, r.texts]).toLowerCase().includes(words));
  const found = rows.map((r) => r.row);
  if (!sort) return found;
  const value = (r) => (sort.startsWith("component.") ? r.reward_components?.[sort.slice(10)] : r[sort]);
  const sign = descending ? -1 : 1;
  return found.toSorted((a, b) => {
    const [x, y] = [value(a) ?? null, value(b) ?? null];
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  });
}

function bundledPage(parameters) {
  const rows = bundledRows(parameters);
  const { offset = 0, limit = 100 } = parameters;
  const done = { done: 1, total: 1 };
  return { rows: rows.slice(offset, offset + limit), total: rows.length, offset, searching: done };
}

function bundledNeighbours(parameters, one) {
  const rows = bundledRows(parameters);
  const at = rows.findIndex((r) => one(r) === one({ ...parameters, run: parameters.of_run }));
  const place = at < 0 ? null : at + 1;
  return { place, previous: at > 0 ? rows[at - 1] : null, next: at < 0 ? null : (rows[at + 1] ?? null) };
}
