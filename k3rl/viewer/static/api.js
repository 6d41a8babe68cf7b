// The server's answers; in a static bundle, the answers that it carries.

import { bundle as carried, fromBundle } from "./bundled.js";

export const bundle = carried;

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
