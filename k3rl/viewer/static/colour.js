// What colours a token: a number or a kind per token, and the scale that turns it into a colour.

import { number } from "./dom.js";

const VERSIONS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const CHANNELS = { think: "--ch-think", response: "--ch-response", tool_call: "--ch-call", observation: "--ch-observation", structure: "--ch-structure" };

/** Ways to colour, in the order of the number keys. `of(tokens, i)`: the value, null where there is none. */
export const COLOURINGS = [
  { name: "logprob", label: "log-prob", key: "1", kind: "low", of: (t, i) => t.logprobs?.[i], meaning: "the engine's, of what was sampled; strong: unlikely" },
  { name: "advantage", label: "advantage", key: "2", kind: "signed", of: (t, i) => t.token_advantages?.[i], meaning: "what multiplies the token's gradient" },
  { name: "teacher", label: "teacher gap", key: "3", kind: "signed", of: (t, i) => difference(t.teacher_logprobs, t.logprobs, i), meaning: "teacher − engine log-prob; positive: the teacher would rather say it" },
  { name: "trainer", label: "trainer − engine", key: "4", kind: "signed", of: (t, i) => difference(t.trainer_logprobs, t.logprobs, i), meaning: "log-ratio before the update" },
  { name: "version", label: "policy version", key: "5", kind: "version", of: (t, i) => t.policy_versions?.[i], meaning: "the weights that sampled it" },
  { name: "channel", label: "channel", key: "6", kind: "channel", of: (t, i) => t.channels?.[i], meaning: "think, response, tool call, observation, structure" },
];

function difference(a, b, i) {
  const [x, y] = [a?.[i], b?.[i]];
  if (typeof x === "string" || typeof y === "string") return typeof x === "string" ? x : y;
  return x === null || x === undefined || y === null || y === undefined ? null : x - y;
}

export function colouring(name) {
  return COLOURINGS.find((c) => c.name === name) ?? COLOURINGS[0];
}

export function values(tokens, by) {
  return tokens.ids.map((_, i) => by.of(tokens, i) ?? null);
}

/** Has the run these numbers at all? */
export function available(tokens, by) {
  return tokens.ids.some((_, i) => by.of(tokens, i) !== null && by.of(tokens, i) !== undefined);
}

/** From values to a CSS colour, with the legend's ends. Outliers don't flatten the rest: the scale ends at the 99th
 *  percentile of sizes; a value that is not finite has a colour of its own. */
export function scaleOf(by, all) {
  const numbers = all.filter((v) => typeof v === "number");
  if (by.kind === "version") {
    const versions = [...new Set(numbers)].sort((a, b) => a - b);
    const color = (v) => `var(${VERSIONS[versions.indexOf(v) % VERSIONS.length]})`;
    return { paint: (v) => (typeof v === "number" ? mix(color(v), 0.34) : ""), strip: (v) => (typeof v === "number" ? color(v) : ""), legend: versions.slice(0, 12).map((v) => [color(v), `version ${v}`]) };
  }
  if (by.kind === "channel") {
    const there = Object.keys(CHANNELS).filter((c) => all.includes(c));
    const color = (v) => `var(${CHANNELS[v] ?? "--faint"})`;
    return { paint: (v) => (v ? mix(color(v), 0.3) : ""), strip: (v) => (v ? color(v) : ""), legend: there.map((c) => [color(c), c.replace("_", " ")]) };
  }
  const sizes = Float64Array.from(numbers, Math.abs).sort();
  const most = sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.99))] || 1;
  const strength = (v) => Math.min(1, Math.abs(v) / most);
  const color = (v) => (by.kind === "low" ? "var(--low)" : v < 0 ? "var(--negative)" : "var(--positive)");
  const legend = by.kind === "low" ? [["var(--low)", `log-prob ${number(-most)}`]] : [["var(--negative)", number(-most)], ["var(--positive)", `+${number(most)}`]];
  return {
    paint: (v) => (v === null ? "" : typeof v === "string" ? "var(--broken)" : mix(color(v), 0.62 * strength(v))),
    strip: (v) => (v === null ? "" : typeof v === "string" ? "var(--broken)" : mix(color(v), 0.12 + 0.88 * strength(v))),
    size: strength,
    legend,
  };
}

function mix(color, share) {
  return share < 0.02 ? "" : `color-mix(in oklab, ${color} ${(100 * share).toFixed(0)}%, transparent)`;
}
