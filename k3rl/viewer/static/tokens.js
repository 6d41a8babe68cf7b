// The tokens of a rollout. Only blocks near the window are in the document, so that 100,000 tokens scroll like 100.

import { available, COLOURINGS, colouring, scaleOf, values } from "./colour.js";
import { button, h, number, replace } from "./dom.js";
import { specials } from "./special.js";

const BLOCK = 240;
const SLACK = 80;
const MARGIN = "1200px 0px";
const STRIP_HEIGHT = 15;
const VISIBLE = { "\n": "⏎\n", "\t": "⇥\t", "\r": "␍" };

/** `tokens`: columns as the server sends them. `onChoose(i)`: a token was chosen; `onColour(name)`. */
export function tokenView(tokens, { colour, chosen, onChoose, onColour }) {
  const ways = COLOURINGS.filter((c) => available(tokens, c));
  let by = ways.includes(colouring(colour)) ? colouring(colour) : (ways[0] ?? colouring("channel"));
  const painted = new Map();
  const paintOf = (way) => {
    if (!painted.has(way)) {
      const of = values(tokens, way);
      painted.set(way, { of, scale: scaleOf(way, of) });
    }
    return painted.get(way);
  };
  let { of: all, scale } = paintOf(by);
  let at = chosen;
  const special = specials(tokens);
  const legend = h("div", { class: "token-legend" });
  const text = h("div", { class: "token-text", role: "document", "aria-label": "Tokens of the response", tabindex: 0 });
  const inspector = h("div", { class: "inspector", "aria-live": "polite" });
  const strips = stripes(tokens, ways, paintOf, (i) => show(i));
  const picker = h("div", { class: "picker", role: "radiogroup", "aria-label": "Colour tokens by" });
  const blocks = cut(tokens).map(([start, end]) => ({ start, end, element: h("div", { class: "block" }), full: false }));
  const observer = new IntersectionObserver((entries) => entries.forEach(visible), { rootMargin: MARGIN });

  function visible({ target, isIntersecting, boundingClientRect }) {
    const block = blocks[Number(target.dataset.block)];
    if (isIntersecting && !block.full) draw(block);
    else if (!isIntersecting && block.full) {
      target.style.setProperty("height", `${boundingClientRect.height}px`);
      target.replaceChildren();
      block.full = false;
    }
  }

  function draw(block) {
    const pieces = [];
    for (let i = block.start; i < block.end; i++) {
      const before = lastVersion(tokens, i);
      const now = tokens.policy_versions?.[i];
      if (before !== null && now !== null && now !== undefined && now !== before) pieces.push(h("span", { class: "resumed", title: "paused here, and resumed by newer weights" }, `‖ resumed by version ${now}`));
      pieces.push(token(i));
    }
    replace(block.element, pieces);
    block.element.style.removeProperty("height");
    block.full = true;
  }

  function token(i) {
    const piece = tokens.text[i];
    const channel = tokens.channels?.[i] ?? "";
    const element = h("span", { class: `t ${channel} ${special.has(tokens.ids[i]) ? "special" : ""} ${tokens.sampled_mask?.[i] === false ? "given" : ""} ${i === at ? "chosen" : ""}`, dataset: { i } }, piece === "" ? "·" : piece.replace(/[\n\t\r]/g, (c) => VISIBLE[c]));
    const color = scale.paint(all[i]);
    if (color) element.style.backgroundColor = color;
    return element;
  }

  function recolour(name) {
    by = colouring(name);
    ({ of: all, scale } = paintOf(by));
    for (const block of blocks) if (block.full) for (const element of block.element.querySelectorAll(".t")) element.style.backgroundColor = scale.paint(all[Number(element.dataset.i)]);
    drawLegend();
    drawPicker();
  }

  function drawLegend() {
    replace(legend, scale.legend.map(([color, name]) => h("span", { class: "legend-item" }, h("span", { class: "swatch", style: { background: color } }), name)), h("span", { class: "faint" }, by.meaning));
  }

  function drawPicker() {
    replace(
      picker,
      ways.map((c) => button(c.label, () => (recolour(c.name), onColour(c.name)), { role: "radio", class: "pick", "aria-checked": String(c === by), title: `${c.meaning} (key ${c.key})`, dataset: { colour: c.name } })),
    );
  }

  function inspect(i) {
    replace(inspector, i === null ? h("span", { class: "faint" }, "Point at a token for its numbers; click to keep it and to link to it.") : details(tokens, i));
  }

  function mark(i) {
    text.querySelector(".t.chosen")?.classList.remove("chosen");
    at = i;
    text.querySelector(`.t[data-i="${i}"]`)?.classList.add("chosen");
    inspect(i);
    strips.mark(i);
  }

  /** Choose a token and bring it to the window. */
  function show(i, { quietly = false } = {}) {
    const block = blocks.find((b) => i >= b.start && i < b.end);
    if (!block) return;
    if (!block.full) draw(block);
    mark(i);
    text.querySelector(`.t[data-i="${i}"]`)?.scrollIntoView({ block: "center" });
    if (!quietly) onChoose(i);
  }

  text.addEventListener("mouseover", (event) => {
    const i = event.target.closest?.(".t")?.dataset.i;
    if (i !== undefined) inspect(Number(i));
  });
  text.addEventListener("mouseleave", () => inspect(at));
  text.addEventListener("click", (event) => {
    const i = event.target.closest?.(".t")?.dataset.i;
    if (i === undefined || String(getSelection())) return;
    mark(Number(i));
    onChoose(Number(i));
  });
  blocks.forEach((block, b) => {
    block.element.dataset.block = b;
    const pieces = tokens.text.slice(block.start, block.end);
    const lines = 1 + pieces.join("").length / 95 + pieces.filter((p) => p.includes("\n")).length;
    block.element.style.setProperty("height", `${Math.ceil(lines) * 23}px`);
    text.append(block.element);
    observer.observe(block.element);
  });
  drawPicker();
  drawLegend();
  inspect(at);
  const view = h("section", { class: "tokens", "aria-label": "Tokens" }, h("div", { class: "token-head" }, picker, legend, strips.element, inspector), text);
  requestAnimationFrame(() => {
    setTimeout(strips.draw); // the text is seen first
    if (at !== null) show(at, { quietly: true });
  });
  return {
    view,
    show,
    colourByKey: (key) => ways.find((c) => c.key === key) && (recolour(ways.find((c) => c.key === key).name), onColour(by.name)),
    step: (by) => at !== null && show(Math.max(0, Math.min(tokens.ids.length - 1, at + by))),
    leave: () => observer.disconnect(),
  };
}

/** [start, end) of blocks; a block ends at a line's end where there is one nearby. */
export function cut(tokens) {
  const found = [];
  let start = 0;
  while (start < tokens.ids.length) {
    let end = Math.min(start + BLOCK, tokens.ids.length);
    for (let i = end; i < Math.min(end + SLACK, tokens.ids.length); i++) {
      if (tokens.text[i - 1].endsWith("\n")) {
        end = i;
        break;
      }
    }
    found.push([start, end]);
    start = end;
  }
  return found;
}

/** Version of the last sampled token before `i`; null at the start, and after another's tokens. */
function lastVersion(tokens, i) {
  if (!tokens.policy_versions || i === 0) return null;
  for (let j = i - 1; j >= 0 && j > i - 4000; j--) if (tokens.policy_versions[j] !== null) return tokens.policy_versions[j];
  return null;
}

function details(tokens, i) {
  const logprob = tokens.logprobs?.[i];
  const fact = (name, value) => (value === null || value === undefined ? null : h("span", { class: "fact" }, h("span", { class: "faint" }, name), " ", h("b", {}, typeof value === "number" ? number(value, 4) : value)));
  const gap = (name) => {
    const c = colouring(name);
    return c.of(tokens, i);
  };
  const log_ratio = gap("trainer");
  return [
    h("code", { class: "piece" }, JSON.stringify(tokens.text[i])),
    fact("token", i),
    fact("id", String(tokens.ids[i])),
    fact("channel", tokens.channels?.[i]?.replace("_", " ")),
    tokens.special?.includes(tokens.ids[i]) ? h("span", { class: "tag" }, "structure token") : null,
    tokens.sampled_mask?.[i] === false ? h("span", { class: "tag" }, "not sampled") : null,
    fact("log-prob", logprob),
    typeof logprob === "number" ? fact("p", `${number(100 * Math.exp(logprob), 2)} %`) : null,
    fact("trainer", tokens.trainer_logprobs?.[i]),
    fact("difference", log_ratio),
    typeof log_ratio === "number" ? fact("ratio", Math.exp(log_ratio)) : null,
    fact("teacher", tokens.teacher_logprobs?.[i]),
    fact("teacher gap", gap("teacher")),
    fact("advantage", tokens.token_advantages?.[i]),
    fact("version", tokens.policy_versions?.[i] === null ? null : tokens.policy_versions?.[i]),
  ];
}

/** One thin picture per way to colour, over the whole response; a click leads there. */
function stripes(tokens, ways, paintOf, onPick) {
  const canvases = ways.map((by) => ({ by, canvas: h("canvas", { class: "strip", height: STRIP_HEIGHT, role: "img", "aria-label": `${by.label} over the response` }) }));
  const marker = h("div", { class: "strip-marker", hidden: true });
  const area = h("div", { class: "strip-area" }, canvases.map((c) => c.canvas), marker);
  const count = tokens.ids.length;
  const element = h("div", { class: "strips" }, h("div", { class: "strip-names" }, ways.map((w) => h("span", {}, w.label))), area);
  area.addEventListener("click", (event) => {
    const box = area.getBoundingClientRect();
    onPick(Math.max(0, Math.min(count - 1, Math.floor((count * (event.clientX - box.left)) / box.width))));
  });
  return {
    element,
    draw: () => canvases.forEach(({ by, canvas }) => drawStrip(canvas, paintOf(by))),
    mark: (i) => {
      marker.hidden = i === null;
      marker.style.left = `${(100 * (i + 0.5)) / count}%`;
    },
  };
}

/** Each pixel shows its strongest token. */
function drawStrip(canvas, { of: all, scale }) {
  const width = (canvas.width = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio)));
  const context = canvas.getContext("2d");
  const painted = new Map();
  const probe = h("span", { hidden: true });
  document.body.append(probe);
  const resolved = (color) => {
    if (!painted.has(color)) {
      probe.style.color = color;
      painted.set(color, getComputedStyle(probe).color);
    }
    return painted.get(color);
  };
  for (let x = 0; x < width; x++) {
    const [from, to] = [Math.floor((x * all.length) / width), Math.max(Math.floor(((x + 1) * all.length) / width), Math.floor((x * all.length) / width) + 1)];
    let best = null;
    for (let i = from; i < to && i < all.length; i++) {
      if (all[i] === null) continue;
      if (typeof all[i] === "string" && scale.size) best = all[i];
      else if (best === null || (scale.size && typeof best === "number" && scale.size(all[i]) > scale.size(best))) best = all[i];
    }
    const color = best === null ? "" : scale.strip(best);
    if (!color) continue;
    context.fillStyle = resolved(color);
    context.fillRect(x, 0, 1, STRIP_HEIGHT);
  }
  probe.remove();
}
