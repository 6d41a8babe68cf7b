// Where one is, as an address: `#/view/part/part?name=value`. Everything that makes up a view is in it.

/** `{view, parts, get(name), all(name), parameters}` of the current address. */
export function place(hash = location.hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view = "", ...parts] = path.split("/").map(decodeURIComponent);
  const parameters = new URLSearchParams(search);
  return {
    view: view || "metrics",
    parts,
    parameters,
    get: (name, otherwise = "") => parameters.get(name) ?? otherwise,
    all: (name) => parameters.getAll(name),
  };
}

/** The address of a view. `parameters`: an object (lists repeat a name) or URLSearchParams. */
export function address(view, parts = [], parameters = {}) {
  const search = new URLSearchParams();
  const entries = parameters instanceof URLSearchParams ? [...parameters] : Object.entries(parameters);
  for (const [name, value] of entries) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined && one !== false) search.append(name, one);
    }
  }
  const tail = search.toString();
  return `#/${[view, ...parts].map(encodeURIComponent).join("/")}${tail ? `?${tail}` : ""}`;
}

/** The same place with some parameters changed; an empty value takes one out. */
export function changed(changes, from = place()) {
  const parameters = new URLSearchParams(from.parameters);
  for (const [name, value] of Object.entries(changes)) {
    parameters.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined && one !== false) parameters.append(name, one);
    }
  }
  return address(from.view, from.parts, parameters);
}

export function go(to, { quietly = false } = {}) {
  if (quietly) history.replaceState(null, "", to);
  else location.hash = to;
}

/** What a list shows: runs, filter and order travel with every link from it. */
export function listParameters(from = place()) {
  return {
    run: from.all("run"),
    filter: from.get("filter"),
    sort: from.get("sort"),
    descending: from.get("descending"),
  };
}

export function rolloutAddress(row, parameters = {}) {
  return address("rollout", [row.run, row.step, row.draw, row.sample], parameters);
}

export function groupAddress(row, parameters = {}) {
  return address("group", [row.run, row.step, row.draw], parameters);
}

/** A problem over steps and runs; from a rollout, with that rollout on the left. */
export function problemAddress(row, parameters = {}) {
  return address("problem", [row.problem_id ?? ""], { run: parameters.run, ...(row.sample === undefined ? {} : { a: [row.run, row.step, row.draw, row.sample].join(" ") }) });
}
