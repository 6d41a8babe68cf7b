// A rollout as a person reads it: messages of the prompt, then turns, each by channel.

import { h, number } from "./dom.js";
import { marked, specials } from "./special.js";

const NAMES = { think: "thinking", response: "response", tool_call: "tool call", observation: "observation", structure: "structure" };
const LONG = 12000;
const AT_ONCE = 40;

/** Runs of tokens of one author, channel and version: `{sampled, channel, version, start, end}`. */
export function segments(tokens) {
  const found = [];
  for (let i = 0; i < tokens.ids.length; i++) {
    const one = { sampled: tokens.sampled_mask?.[i] ?? true, channel: tokens.channels?.[i] ?? "response", version: tokens.policy_versions?.[i] ?? null };
    const last = found.at(-1);
    if (last && last.sampled === one.sampled && last.channel === one.channel && last.version === one.version) last.end = i + 1;
    else found.push({ ...one, start: i, end: i + 1 });
  }
  return found;
}

/** Turns: the policy's tokens, then the environment's, and so on; each with its channels' texts. */
export function turns(tokens) {
  const found = [];
  for (const s of segments(tokens)) {
    if (!found.length || found.at(-1).sampled !== s.sampled) found.push({ sampled: s.sampled, start: s.start, parts: [] });
    const parts = found.at(-1).parts;
    const text = tokens.text.slice(s.start, s.end).join("");
    if (parts.length && parts.at(-1).channel === s.channel) {
      parts.at(-1).text += text;
      parts.at(-1).end = s.end;
    } else parts.push({ channel: s.channel, text, start: s.start, end: s.end });
  }
  return found;
}

export function readingView(whole, { structure = false, onToken = null } = {}) {
  return h("div", { class: "reading" }, promptView(whole), responseView(whole, { structure, onToken }));
}

export function promptView(whole) {
  const messages = Array.isArray(whole.traces.messages) ? whole.traces.messages : [];
  if (!messages.length && !whole.texts.prompt_text) return null;
  if (!messages.length) return bubble("prompt", "prompt", longText(whole.texts.prompt_text));
  return messages.map((m) => bubble("message", m?.role ?? "message", messageBody(m)));
}

/** What is no message at all is shown as it is: other programs' files hold anything. */
function messageBody(message) {
  if (typeof message !== "object" || message === null) return longText(String(message));
  const body = [longText(contentText(message.content))];
  const reasoning = message.reasoning_content ?? message.reasoning;
  if (reasoning) body.unshift(channelBox("think", longText(String(reasoning))));
  for (const call of Array.isArray(message.tool_calls) ? message.tool_calls : []) body.push(channelBox("tool_call", callView(call)));
  return body;
}

/** A call as chat APIs write it: arguments are JSON in a text, or already read. */
function callView(call) {
  const f = call?.function ?? call ?? {};
  const given = typeof f.arguments === "string" ? parsed(f.arguments) : f.arguments;
  const known = typeof given === "object" && given !== null && !Array.isArray(given);
  return callBox({ name: f.name ?? "?", arguments: known ? given : {}, raw: known || given === undefined ? "" : String(f.arguments) });
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text; // shown as it is
  }
}

export function contentText(content) {
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((p) => (typeof p === "string" ? p : (p?.text ?? `[${p?.type ?? "part"}]`))).join("\n");
  return content === null || content === undefined ? "" : JSON.stringify(content, null, 1);
}

export function responseView(whole, { structure = false, onToken = null } = {}) {
  const { tokens } = whole;
  if (!tokens.ids.length || !tokens.decoded) return untokenised(whole);
  const special = specials(tokens);
  const calls = new Map((tokens.calls ?? []).map((t) => [t.start, t.calls]));
  const view = (turn) =>
    bubble(
      `turn ${turn.sampled ? "policy" : "environment"}`,
      turn.sampled ? "policy" : "environment",
      turn.parts
        .filter((p) => structure || p.channel !== "structure")
        .filter((p) => p.text.trim() || p.channel === "structure")
        .map((p) => channelBox(p.channel, partBody(p, tokens, special, structure ? undefined : calls.get(turn.start)), p, onToken)),
    );
  return inPieces(turns(tokens), view);
}

/** A long list is built as one comes to its end, so that a thousand turns open like ten. */
function inPieces(items, view) {
  if (items.length <= AT_ONCE) return items.map(view);
  const box = h("div", {}, items.slice(0, AT_ONCE).map(view));
  let done = AT_ONCE;
  const end = h("p", { class: "faint" }, `${number(items.length - done)} more turns`);
  const observer = new IntersectionObserver((seen) => {
    if (!seen.some((s) => s.isIntersecting)) return;
    box.append(...items.slice(done, done + AT_ONCE).map(view));
    done += AT_ONCE;
    observer.unobserve(end);
    if (done >= items.length) return end.remove();
    end.textContent = `${number(items.length - done)} more turns`;
    observer.observe(end);
  }, { rootMargin: "600px 0px" });
  observer.observe(end);
  return [box, end];
}

/** Rows that other programs wrote, and runs without their tokenizer: messages where there are any, else texts. */
function untokenised({ texts, traces }) {
  if (Array.isArray(traces.turns) && traces.turns.length) return traces.turns.map((m) => bubble(`turn ${m?.role === "assistant" ? "policy" : "environment"}`, m?.role ?? "message", messageBody(m)));
  const parts = [];
  if (texts.reasoning) parts.push(channelBox("think", longText(texts.reasoning)));
  if (texts.content || texts.response_text) parts.push(channelBox("response", longText(texts.content || texts.response_text)));
  return parts.length ? bubble("turn policy", "policy", parts) : h("p", { class: "faint" }, "The response is empty.");
}

/** Calls are shown as calls; what the format cannot read, and everything else, as its text. */
function partBody(part, tokens, special, calls) {
  if (part.channel === "tool_call" && calls) return calls.map(callBox);
  if (part.text.length > LONG) return longText(part.text);
  return h("div", { class: "prose" }, marked(tokens.ids, tokens.text, special, part.start, part.end));
}

function callBox({ name, arguments: given, malformed, raw }) {
  const rows = Object.entries(given ?? {}).map(([key, value]) => [h("dt", {}, key), h("dd", {}, typeof value === "string" ? value : JSON.stringify(value))]);
  return h("div", { class: "call" }, h("b", {}, name), malformed ? h("span", { class: "tag bad" }, malformed) : null, raw ? h("pre", {}, raw) : null, rows.length ? h("dl", { class: "arguments" }, rows) : null);
}

function bubble(kind, who, body) {
  return h("article", { class: `bubble ${kind}` }, h("header", {}, who), h("div", { class: "bubble-body" }, body));
}

function channelBox(channel, body, part = null, onToken = null) {
  const range = part ? h("span", { class: "faint" }, `${number(part.end - part.start)} tokens`) : null;
  const jump = part && onToken ? h("button", { type: "button", class: "quiet", onclick: () => onToken(part.start), title: "See these tokens" }, "tokens →") : null;
  const title = h("span", { class: "channel-name" }, NAMES[channel] ?? channel);
  if (channel === "think") return h("details", { class: `channel ${channel}`, open: true }, h("summary", {}, title, range, jump), h("div", { class: "channel-text" }, body));
  return h("section", { class: `channel ${channel}` }, h("div", { class: "channel-head" }, title, range, jump), h("div", { class: "channel-text" }, body));
}

/** The whole text is there; what is beyond a few screens waits for a click. */
export function longText(text) {
  if (text.length <= LONG) return h("div", { class: "prose" }, text);
  const box = h("div", { class: "prose" }, text.slice(0, LONG));
  const more = h("button", { type: "button", onclick: () => (box.replaceChildren(text), more.remove()) }, `Show all ${number(text.length)} characters`);
  return [box, more];
}
