// Views: a view is its address. Named ones are kept by this browser; links carry them to other people.

import { button, copyText, h, replace } from "./dom.js";
import { address, go, place } from "./router.js";

const KEPT = "k3rl-views";
/** What everyone asks first, as filters over the rollouts. */
const OFFERED = [
  ["Best first", { sort: "reward", descending: "true" }],
  ["Longest first", { sort: "sampled_tokens", descending: "true" }],
  ["Truncated", { filter: 'status = "truncated"' }],
  ["Not scored", { filter: "reward is null" }],
  ["Groups with signal", { filter: "group_reward_std > 0" }],
  ["Trainer and engine far apart", { sort: "logprob_gap_max", descending: "true", columns: "step,problem_id,domain,reward,logprob_gap_mean,logprob_gap_max,versions,staleness_max" }],
  ["Flagged", { filter: "flag is not null" }],
];

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "[]");
  } catch {
    return []; // what another program put there
  }
}

/** The body of the menu of views. */
export function viewsMenu() {
  const body = h("div", { class: "menu-body views-menu" });
  const name = h("input", { type: "text", placeholder: "Name of this view", "aria-label": "Name of this view" });
  const store = (views) => {
    localStorage.setItem(KEPT, JSON.stringify(views));
    draw();
  };
  const keep = (event) => {
    event.preventDefault();
    if (name.value.trim()) store([...kept().filter((v) => v.name !== name.value.trim()), { name: name.value.trim(), hash: location.hash }]);
    name.value = "";
  };
  const draw = () =>
    replace(
      body,
      OFFERED.map(([label, parameters]) => h("a", { href: address("rollouts", [], { run: place().all("run"), ...parameters }) }, label)),
      h("hr", {}),
      kept().map((v) => h("span", { class: "kept" }, h("a", { href: v.hash, onclick: (e) => (e.preventDefault(), go(v.hash)) }, v.name), button("×", () => store(kept().filter((o) => o.name !== v.name)), { class: "quiet", "aria-label": `Forget ${v.name}` }))),
      h("form", { onsubmit: keep }, name, h("button", { type: "submit" }, "Keep")),
      button("Copy a link to this view", () => copyText(location.href, "Link")),
    );
  draw();
  return body;
}
