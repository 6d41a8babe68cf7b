// Line charts in SVG: hover or arrow keys read values, a click leads to the step's rollouts.

import { h, number, replace, svg } from "./dom.js";

const SIZE = { width: 520, height: 220, left: 52, right: 12, top: 10, bottom: 26 };

/** `series`: [{name, color, dash, steps, values}], with `clouds` (numbers by step) also drawn as faint dots. Values that are null break the line; words such as "NaN" are
 *  marked on the axis, so that they are seen. `onStep(step)`: what a click does. */
export function lineChart({ title, series, onStep = null, unit = "", smooth = 0, note = "" }) {
  const shown = series.filter((s) => s.steps.length);
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, title, unit ? h("span", { class: "unit" }, unit) : null));
  if (!shown.length) {
    figure.append(h("p", { class: "faint" }, note || "Nothing was recorded."));
    return figure;
  }
  const lines = shown.map((s) => ({ ...s, smoothed: smooth ? smoothed(s.values, smooth) : s.values }));
  const scale = scales(lines);
  const picture = svg("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, tabindex: 0, role: "img", "aria-label": summary(title, lines) });
  picture.append(axes(scale));
  for (const line of lines) picture.append(...drawn(line, scale, smooth));
  const cursor = svg("line", { class: "cursor", y1: SIZE.top, y2: SIZE.height - SIZE.bottom, visibility: "hidden" });
  const readout = h("div", { class: "readout", hidden: true });
  picture.append(cursor);
  figure.append(h("div", { class: "plot" }, picture, readout), ...legend(lines));
  follow(picture, cursor, readout, lines, scale, onStep);
  return figure;
}

/** Exponential moving average, corrected for its start; nulls stay null. */
export function smoothed(values, weight) {
  let mean = 0;
  let mass = 0;
  return values.map((v) => {
    if (typeof v !== "number") return v;
    mean = weight * mean + (1 - weight) * v;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function scales(lines) {
  const steps = lines.flatMap((l) => l.steps);
  const values = lines.flatMap((l) => [...l.values, ...(l.clouds ?? []).flat()].filter((v) => typeof v === "number"));
  let [x0, x1] = [steps.reduce((a, b) => Math.min(a, b), Infinity), steps.reduce((a, b) => Math.max(a, b), -Infinity)];
  let [y0, y1] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (!values.length) [y0, y1] = [0, 1];
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  const margin = y1 > y0 ? 0.06 * (y1 - y0) : Math.abs(y0) * 0.1 || 0.5;
  [y0, y1] = [y0 >= 0 && y0 < 0.35 * y1 ? 0 : y0 - margin, y1 + margin];
  const inner = { width: SIZE.width - SIZE.left - SIZE.right, height: SIZE.height - SIZE.top - SIZE.bottom };
  return {
    x: (s) => SIZE.left + (inner.width * (s - x0)) / (x1 - x0),
    y: (v) => SIZE.top + inner.height * (1 - (v - y0) / (y1 - y0)),
    step: (px) => x0 + ((px - SIZE.left) / inner.width) * (x1 - x0),
    domain: [x0, x1, y0, y1],
  };
}

/** Round numbers that cover a range. */
export function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) ?? 10 * power;
  const found = [];
  for (let t = Math.ceil(low / size) * size; t <= high + 1e-9 * size; t += size) found.push(Math.abs(t) < size / 1e6 ? 0 : t);
  return found;
}

function axes({ x, y, domain: [x0, x1, y0, y1] }) {
  const group = svg("g", { class: "axes", "aria-hidden": "true" });
  for (const t of ticks(y0, y1, 4)) {
    group.append(svg("line", { class: "grid", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: y(t), y2: y(t) }));
    group.append(svg("text", { x: SIZE.left - 6, y: y(t) + 4, "text-anchor": "end" }, number(t)));
  }
  for (const t of ticks(x0, x1, 6).filter(Number.isInteger)) {
    group.append(svg("text", { x: x(t), y: SIZE.height - 8, "text-anchor": "middle" }, number(t)));
  }
  return group;
}

function drawn(line, scale, smooth) {
  const style = { stroke: line.color, ...(line.dash ? { "stroke-dasharray": line.dash } : {}) };
  const found = [svg("path", { class: "line", d: path(line.steps, line.smoothed, scale), style })];
  if (smooth) found.unshift(svg("path", { class: "line raw", d: path(line.steps, line.values, scale), style }));
  found.unshift(...(line.clouds ?? []).flatMap((cloud, i) => swarm(cloud, line.steps[i], line.color, scale)));
  const single = line.values.filter((v) => typeof v === "number").length <= 40;
  line.values.forEach((v, i) => {
    if (typeof v === "number") {
      if (single && !smooth) found.push(svg("circle", { class: "dot", cx: scale.x(line.steps[i]), cy: scale.y(v), r: 2.2, style: { fill: line.color } }));
    } else if (v !== null) {
      found.push(svg("text", { class: "not-finite", x: scale.x(line.steps[i]), y: SIZE.top + 10, "text-anchor": "middle" }, String(v)));
    }
  });
  return found;
}

/** Dots of a step; equal ones stand beside each other. */
function swarm(cloud, step, color, scale) {
  const rows = Map.groupBy(cloud, (v) => Math.round(scale.y(v) / 3));
  return [...rows.values()].flatMap((same) => same.map((v, k) => svg("circle", { class: "cloud", cx: scale.x(step) + 3.6 * (k - (same.length - 1) / 2), cy: scale.y(v), r: 1.8, style: { fill: color } })));
}

function path(steps, values, { x, y }) {
  let d = "";
  let pen = "M";
  values.forEach((v, i) => {
    if (typeof v !== "number") return (pen = "M");
    d += `${pen}${x(steps[i]).toFixed(1)} ${y(v).toFixed(1)}`;
    pen = "L";
  });
  return d;
}

function legend(lines) {
  if (lines.length === 1 && !lines[0].name) return [];
  const key = (l) => svg("svg", { class: "line-key", viewBox: "0 0 18 4", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 18, y1: 2, y2: 2, style: { stroke: l.color, "stroke-dasharray": l.dash ?? "none" } }));
  return [h("ul", { class: "legend" }, lines.map((l) => h("li", {}, key(l), l.name)))];
}

function summary(title, lines) {
  const said = lines.map((l) => {
    const numbers = l.values.filter((v) => typeof v === "number");
    return `${l.name || title}: from ${number(numbers[0])} to ${number(numbers.at(-1))} over ${l.steps.length} steps`;
  });
  return `${title}. ${said.join("; ")}`;
}

function follow(picture, cursor, readout, lines, scale, onStep) {
  const every = [...new Set(lines.flatMap((l) => l.steps))].sort((a, b) => a - b);
  let at = null;
  const read = (step) => {
    at = every.reduce((best, s) => (Math.abs(s - step) < Math.abs(best - step) ? s : best), every[0]);
    const px = scale.x(at);
    cursor.setAttribute("x1", px);
    cursor.setAttribute("x2", px);
    cursor.setAttribute("visibility", "visible");
    readout.hidden = false;
    readout.classList.toggle("left", px > SIZE.width * 0.55);
    const items = lines
      .filter((l) => l.steps.includes(at))
      .map((l) => h("li", {}, h("span", { class: "key", style: { "--key": l.color } }), `${l.name || ""} `, h("b", {}, number(l.values[l.steps.indexOf(at)], 4))));
    replace(readout, h("div", { class: "readout-step" }, `step ${at}`), h("ul", {}, items), onStep ? h("div", { class: "faint" }, "click: its rollouts") : null);
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    readout.hidden = true;
  };
  const toStep = (event) => {
    const box = picture.getBoundingClientRect();
    return scale.step(((event.clientX - box.left) / box.width) * SIZE.width);
  };
  picture.addEventListener("pointermove", (event) => read(toStep(event)));
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return event.key === "Enter" && at !== null && onStep?.(at);
    event.preventDefault();
    const next = every.indexOf(at) + (event.key === "ArrowRight" ? 1 : -1);
    read(every[Math.max(0, Math.min(every.length - 1, at === null ? 0 : next))]);
  });
  if (onStep) {
    picture.classList.add("clickable");
    picture.addEventListener("click", (event) => {
      read(toStep(event));
      onStep(at);
    });
  }
}

/** A bar from zero, for a number beside its text. `range`: [lowest, highest] of its like. */
export function meter(value, [low, high], label = "") {
  const width = Math.max(high, 0) - Math.min(low, 0) || 1;
  const zero = -Math.min(low, 0) / width;
  const at = typeof value === "number" ? zero + value / width : zero;
  const [from, to] = [Math.min(zero, at), Math.max(zero, at)].map((v) => Math.max(0, Math.min(1, v)));
  return h(
    "span",
    { class: `meter ${value < 0 ? "below" : ""}`, role: label ? "img" : null, "aria-label": label || null, "aria-hidden": label ? null : "true" },
    h("span", { class: "meter-fill", style: { left: `${100 * from}%`, width: `${100 * (to - from)}%` } }),
  );
}

/** From the middle to the right for better, to the left for worse. */
export function changeBar(change) {
  const size = Math.min(50, 50 * Math.abs(change));
  const better = change > 0;
  return [
    h("span", { class: `meter change ${better ? "" : "below"}`, "aria-hidden": "true" }, h("span", { class: "meter-fill", style: { left: `${better ? 50 : 50 - size}%`, width: `${size}%` } })),
    h("span", { class: better ? "positive" : change < 0 ? "negative" : "faint" }, ` ${better ? "+" : ""}${number(change)}`),
  ];
}
