// What people flagged and wrote, in one list; exported as notes, as conversations, as pairs.

import { get, getBlob, post } from "./api.js";
import { button, download, empty, h, number, replace, toast } from "./dom.js";
import { bindKeys } from "./keys.js";
import { changed, go, problemAddress, rolloutAddress } from "./router.js";

const FLAGS = { good: "✓ good", bad: "✗ bad", look: "◉ look" };
const FORMS = [
  ["notes", "Notes", "a line for each flag and comment"],
  ["sft", "Good ones as conversations", "messages, for SFT"],
  ["preference", "Good against bad", "prompt, chosen and rejected, for preference training"],
];

export async function showNotes(main, { here, runs, current }) {
  const [found, said] = await loadNotes(runs);
  if (!current()) return null;
  const again = () => showNotes(main, { here, runs, current });
  const only = here.get("flag");
  const rows = found.rows.filter((r) => !only || (r.flag ?? "none") === only);
  const list = { run: here.all("run"), filter: "flag is not null or note is not null" };
  replace(
    main,
    h("div", { class: "bar" }, h("h1", {}, "Notes"), chips(found.rows, only)),
    found.rows.length ? exports(found, runs) : null,
    found.rows.length ? h("ul", { class: "notes", "aria-label": "Notes" }, rows.map((r) => item(r, said[r.rid] ?? {}, list, again))) : empty("Nobody has flagged a rollout yet.", "Open one, and press f (good), b (bad) or l (to look at)."),
  );
  const links = [...main.querySelectorAll(".note-open")];
  const walk = (by) => () => links[Math.max(0, Math.min(links.length - 1, links.indexOf(document.activeElement) + by))]?.focus();
  bindKeys({ j: walk(1), ArrowDown: walk(1), k: walk(-1), ArrowUp: walk(-1) });
  return { update: () => current() && !main.contains(document.activeElement) && again() };
}

async function loadNotes(runs) {
  const found = await get("notes", { run: runs });
  const said = found.rows.length ? await get("excerpts", { rid: found.rows.slice(0, 500).map((r) => r.rid) }) : {};
  return [found, said];
}

function chips(rows, only) {
  const counts = [...Object.entries(FLAGS), ["none", "comment only"]].map(([flag, name]) => [flag, name, rows.filter((r) => (r.flag ?? "none") === flag).length]);
  return h("span", { class: "chip-group", role: "group", "aria-label": "Flag" }, counts.filter(([, , n]) => n).map(([flag, name, n]) => button(`${name} ${number(n)}`, () => go(changed({ flag: only === flag ? "" : flag })), { class: `chip ${only === flag ? "on" : ""}`, "aria-pressed": String(only === flag) })));
}

function exports({ counts, left_out }, runs) {
  const fetchIt = async (form) => {
    try {
      download(await getBlob("notes/export", { run: runs, form }), `${form}.jsonl`);
    } catch (error) {
      toast(error.message);
    }
  };
  return h(
    "section",
    { class: "card exports", "aria-label": "Export" },
    FORMS.map(([form, name, meaning]) => h("div", {}, button(`${name} (${number(counts[form])})`, () => fetchIt(form), { disabled: !counts[form], dataset: { form } }), h("span", { class: "faint" }, ` ${meaning}`))),
    left_out ? h("p", { class: "faint" }, `${number(left_out)} flagged rollouts of several turns, or without messages, are not conversations that can be told exactly; they are among the notes only.`) : null,
  );
}

function item(row, { question, answer }, list, reload) {
  const takeBack = async () => {
    try {
      await post("notes", { run: row.run, step: row.step, draw: row.draw, sample: row.sample, flag: "", note: "" });
      toast("Note taken back");
      await reload();
    } catch (error) {
      toast(error.message);
    }
  };
  return h(
    "li",
    { class: "card note-item", dataset: { rid: row.rid } },
    h("div", { class: "note-head" }, row.flag ? h("span", { class: `flag-${row.flag}` }, FLAGS[row.flag]) : null, h("a", { class: "note-open", href: rolloutAddress(row, list) }, `${row.run}, step ${row.step}, ${row.draw}.${row.sample}`), h("a", { class: "problem faint", href: problemAddress(row, list) }, row.problem_id ?? ""), h("span", { class: "faint" }, `reward ${number(row.reward)}`), button("take back", takeBack, { class: "quiet", "aria-label": `Take the note on ${row.draw}.${row.sample} back` })),
    row.note ? h("p", { class: "prose" }, row.note) : null,
    h("p", { class: "faint excerpt" }, [question, answer].filter(Boolean).join(" → ")),
  );
}
