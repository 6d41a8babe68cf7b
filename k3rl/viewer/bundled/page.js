// The whole script of a bundle. Everything from rollouts reaches the page as text.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const list = document.getElementById("list"), one = document.getElementById("one"), find = document.getElementById("find");
const COLOURS = { channel: null, "log-prob": "logprobs", advantage: "token_advantages", "trainer − engine": "trainer_logprobs", "engine − teacher": "teacher_logprobs" };
let colour = "channel";

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

const keyOf = ({ row }) => [row.run, row.step, row.draw, row.sample].map(encodeURIComponent).join("/");
const number = (x) => (typeof x === "number" ? String(Number(x.toPrecision(4))) : String(x ?? "–"));
const said = (r) => r.texts.content || r.texts.response_text || "";

function drawList() {
  const words = find.value.toLowerCase();
  const shown = data.rollouts.filter((r) => !words || `${r.question}\n${said(r)}\n${r.row.problem_id}`.toLowerCase().includes(words));
  list.replaceChildren(
    ...shown.map((r) =>
      h("a", { href: `#${keyOf(r)}`, "data-key": keyOf(r) },
        h("span", {}, `${r.row.run} · step ${r.row.step} · ${r.row.draw}.${r.row.sample} · reward ${number(r.row.reward)} · ${r.row.stop_reason ?? r.row.status ?? ""}`),
        h("p", {}, r.question.slice(0, 200)), h("p", {}, said(r).slice(0, 200)))),
  );
  mark();
}

function current() {
  return data.rollouts.find((r) => keyOf(r) === location.hash.slice(1)) ?? data.rollouts[0];
}

function mark() {
  for (const link of list.children) {
    if (link.dataset.key === keyOf(current())) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

function facts(entries) {
  return h("dl", {}, ...entries.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "object" ? JSON.stringify(value) : number(value))]));
}

function section(title, ...content) {
  return h("section", {}, h("h2", {}, title), ...content);
}

function drawOne() {
  const r = current();
  const { reward_components: parts, run, step, draw, sample, ...rest } = r.row;
  const traces = Object.entries(r.traces).filter(([name]) => !["messages", "timings", "turns"].includes(name));
  one.replaceChildren(
    h("h1", {}, `${run} · step ${step} · rollout ${draw}.${sample}`),
    section("Reward", facts([["total", r.row.reward], ...Object.entries(parts ?? {})]), r.texts.reward_explanation ? h("pre", {}, r.texts.reward_explanation) : null),
    section("Prompt", messages(r.traces.messages) ?? h("pre", {}, r.texts.prompt_text ?? "")),
    section("Response", response(r)),
    r.tokens && r.texts.content ? section("Answer", h("pre", {}, r.texts.content)) : "",
    ...traces.map(([name, value]) => section(name.replaceAll("_", " "), h("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1)))),
    section("All columns", facts(Object.entries(rest))),
  );
  one.scrollTop = 0;
  mark();
}

function messages(given) {
  if (!Array.isArray(given) || !given.length) return null;
  const text = (c) => (typeof c === "string" ? c : Array.isArray(c) ? c.map((p) => p?.text ?? `[${p?.type ?? "part"}]`).join("\n") : JSON.stringify(c ?? ""));
  return h("pre", {}, ...given.flatMap((m) => [h("span", { class: "structure" }, `[${m?.role ?? "?"}]\n`), `${text(m?.content)}\n`, m?.tool_calls ? `${JSON.stringify(m.tool_calls)}\n` : ""]));
}

function response(r) {
  if (!r.tokens) return messages(r.traces.turns) ?? h("pre", {}, r.texts.response_text || said(r));
  const there = Object.entries(COLOURS).filter(([, column]) => !column || r.tokens[column]);
  if (!there.some(([name]) => name === colour)) colour = "channel";
  const choose = h("select", { "aria-label": "Colour tokens by", onchange: (e) => { colour = e.target.value; drawOne(); } },
    ...there.map(([name]) => h("option", name === colour ? { value: name, selected: "" } : { value: name }, name)));
  const text = h("pre", { class: "response" });
  let at = 0;
  for (const [channel, sampled, count] of r.tokens.runs) {
    const pieces = r.tokens.text.slice(at, at + count);
    const run = h("span", { class: channel, title: sampled ? channel : `${channel}, not by the policy` });
    if (colour === "channel") run.append(pieces.join(""));
    else pieces.forEach((piece, i) => run.append(token(r.tokens, at + i, piece)));
    text.append(run);
    at += count;
  }
  return h("div", {}, h("div", { class: "bar" }, h("label", {}, "Colour by ", choose), `${r.tokens.text.length} tokens`), text);
}

function token(tokens, i, piece) {
  const value = valueOf(tokens, i);
  if (value === null) return h("span", {}, piece);
  const strength = Math.min(1, Math.abs(value) / 3);
  const span = h("span", { title: `${piece}: ${number(value)}` }, piece);
  span.style.backgroundColor = value < 0 ? `rgba(200, 70, 40, ${0.65 * strength})` : `rgba(30, 140, 110, ${0.65 * strength})`;
  return span;
}

function valueOf(tokens, i) {
  const own = tokens[COLOURS[colour]][i], engine = tokens.logprobs?.[i];
  if (colour === "trainer − engine") return own === null || engine == null ? null : own - engine;
  if (colour === "engine − teacher") return own === null || engine == null ? null : engine - own;
  return own;
}

function walk(by) {
  const links = [...list.children];
  const here = links.findIndex((l) => l.dataset.key === keyOf(current()));
  const next = links[Math.max(0, Math.min(links.length - 1, here + by))];
  if (next) { location.hash = next.dataset.key; next.scrollIntoView({ block: "nearest" }); }
}

document.getElementById("about").textContent =
  `${data.rollouts.length} of ${data.total} rollouts of ${data.runs.join(", ")}${data.filter ? `, ${data.filter}` : ""}; ${data.redacted} secrets redacted; n and p go on and back`;
find.addEventListener("input", drawList);
window.addEventListener("hashchange", drawOne);
document.addEventListener("keydown", (e) => {
  if (e.target === find || e.metaKey || e.ctrlKey || e.altKey) return;
  if (e.key === "n" || e.key === "j") walk(1);
  if (e.key === "p" || e.key === "k") walk(-1);
});
drawList();
drawOne();
