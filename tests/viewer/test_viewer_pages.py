"""Group, comparison, findings, notes: the viewer's further pages in a real headless Chromium."""

import json
import re
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from browsing import rows_of, served, shot
from playwright.sync_api import Page, expect
from viewer_runs import write_run


def test_samples_of_a_group_stand_side_by_side_and_part_at_a_mark(page: Page, address):
    page.goto(f"{address}/#/rollouts?run=one&filter=step+%3D+1")
    rows_of(page).first.locator(".group-link").click()
    expect(page).to_have_url(re.compile("#/group/one/1/"))
    samples = page.locator(".sample")
    expect(samples).to_have_count(4)
    expect(page.locator(".sample .diverges").first).to_contain_text("from sample 0 at character")
    expect(samples.nth(1)).to_contain_text("adv.")
    shot(page, "group")
    samples.nth(2).get_by_role("button", name="compare with").click()
    expect(page).to_have_url(re.compile("against=2"))
    expect(page.locator(".sample[data-sample='0'] .diverges")).to_contain_text("sample 2")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"#/rollout/one/1/\d+/1"))
    expect(page.locator(".rollout-main")).to_be_visible()
    page.keyboard.press("Shift+G")
    expect(samples).to_have_count(4)
    before = page.url
    page.keyboard.press("n")
    page.wait_for_function("u => location.href !== u", arg=before)
    expect(page).to_have_url(re.compile("#/group/one/1/"))


def test_a_cell_of_domain_and_effort_leads_to_its_rollouts(page: Page, address):
    page.goto(f"{address}/#/cells?run=one&step=1")
    table = page.get_by_role("table", name="reward by domain and effort")
    expect(table.get_by_role("rowheader")).to_have_text(["agent", "arithmetic", "words"])
    shot(page, "cells")
    page.get_by_label("Show").select_option("truncated_share")
    expect(page.get_by_role("table", name="truncated by domain and effort")).to_be_visible()
    page.get_by_role("heading", name="Domain × effort").click()
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("step=2"))
    cell = page.locator(".matrix td a").first
    count = re.search(r"(\d+) rollouts", cell.inner_text()).group(1)
    cell.click()
    expect(rows_of(page)).to_have_count(int(count))


def test_a_finding_shows_as_many_rollouts_as_it_counts(page: Page, address):
    page.goto(f"{address}/#/findings?run=one")
    loops = page.locator(".finding[data-name=tool_loops]")
    expect(loops).to_be_visible()
    shot(page, "findings")
    count = int(loops.locator("b").first.inner_text())
    loops.get_by_role("link").click()
    expect(page).to_have_url(re.compile("filter=repeated_calls"))
    expect(rows_of(page)).to_have_count(count)


def test_two_runs_are_compared_problem_by_problem(page: Page, address):
    page.goto(f"{address}/#/problems")
    page.get_by_label("against").select_option("two")
    expect(page).to_have_url(re.compile("with=two"))
    expect(page.locator("main")).to_contain_text("mean reward in two minus that in one")
    changed = page.get_by_role("table", name="Most changed")
    shot(page, "problems")
    problem = changed.get_by_role("link").first
    name = problem.inner_text()
    problem.click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    expect(page.get_by_role("figure", name="Rewards at each draw")).to_contain_text("two")
    expect(page.locator(".pair")).to_contain_text(re.compile("part at character|are the same"))
    dots = page.locator(".dots .chip")
    dots.nth(1).click()
    expect(page).to_have_url(re.compile(r"a=one(\+|%20)"))
    dots.nth(-4).click(modifiers=["Shift"])
    expect(page).to_have_url(re.compile(r"b=two(\+|%20)"))
    expect(page.get_by_role("article", name="Side B")).to_contain_text("two, step")
    shot(page, "problem")
    page.get_by_role("article", name="Side A").get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"#/rollout/one/\d+/\d+/1\?.*token="))
    expect(page.locator(".t.chosen")).to_be_visible()


def flag(page: Page, base: str, place: str, name: str, comment: str = "") -> None:
    page.goto(f"{base}/#/rollout/{place}")
    expect(page.get_by_role("heading", name=f"sample {place[-1]}")).to_be_visible()
    if comment:
        page.get_by_label("Comment").fill(comment)
        page.get_by_role("heading", name="Note").click()
    page.keyboard.press({"good": "f", "bad": "b", "look": "l"}[name])
    expect(page.locator(f"[data-flag={name}]")).to_have_attribute("aria-pressed", "true")


def test_notes_are_listed_and_exported_for_training(page: Page, tmp_path):
    write_run(tmp_path / "noted", steps=1)
    with served(tmp_path / "noted") as base:
        flag(page, base, "noted/0/0/0", "good", "<b>clear</b>, and right")
        flag(page, base, "noted/0/0/1", "bad")
        flag(page, base, "noted/0/1/2", "look")
        page.get_by_role("link", name="Notes").click()
        expect(page.locator(".note-item")).to_have_count(3)
        expect(page.locator(".notes")).to_contain_text("<b>clear</b>, and right")
        shot(page, "notes")
        page.get_by_role("group", name="Flag").get_by_role("button", name="bad").click()
        expect(page.locator(".note-item")).to_have_count(1)
        lines = {form: saved_lines(page, form) for form in ("notes", "sft", "preference")}
        assert sorted(n["flag"] for n in lines["notes"]) == ["bad", "good", "look"]
        (talk,) = lines["sft"]
        assert [m["role"] for m in talk["messages"]] == ["user", "assistant"]
        stored = pq.read_table(tmp_path / "noted" / "rollouts" / "step-000000.parquet").to_pylist()
        first = next(r for r in stored if r["draw"] == 0 and r["sample"] == 0)
        assert talk["messages"][1]["content"] == first["content"]
        assert talk["messages"][1]["reasoning_content"] == first["reasoning"]
        (pair,) = lines["preference"]
        assert pair["prompt"] == talk["messages"][:1]
        assert pair["chosen"][0]["content"] == first["content"]
        page.get_by_role("button", name="Take the note").click()
        expect(page.locator(".note-item")).to_have_count(0)
        page.get_by_role("group", name="Flag").get_by_role("button", name="look").click()
        expect(page.locator(".note-item")).to_have_count(1)


def saved_lines(page: Page, form: str) -> list[dict]:
    with page.expect_download() as download:
        page.locator(f"[data-form={form}]").click()
    return [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]


def first_with(folder: Path, test) -> str:
    """The address of a stored rollout that passes a test."""
    for file in sorted((folder / "rollouts").glob("*.parquet")):
        for r in pq.read_table(file).to_pylist():
            if test(r):
                return f"{folder.name}/{r['step']}/{r['draw']}/{r['sample']}"
    raise AssertionError("there is no such rollout")


def test_tool_calls_are_read_and_structure_is_told_from_text(page: Page, address, runs):
    place = first_with(
        runs / "one", lambda r: r["domain"] == "agent" and r["turns"] == 2 and r["sample"] == 1
    )
    page.goto(f"{address}/#/rollout/{place}")
    expect(page.locator(".call b").first).to_have_text("add")
    expect(page.locator(".arguments").first).to_contain_text("3")
    shot(page, "reading")
    page.locator("[data-mode=raw]").click()
    response = page.locator(".raw").nth(1)
    expect(response.locator(".special").first).to_have_text("<|close|>")
    assert page.locator("main img, main script").count() == 0
    expect(response).to_contain_text("<img src=x")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy as a reproducible prompt").click()
    expect(page.get_by_role("status").last).to_contain_text("Prompt copied")
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert copied["prompt_ids"]
    assert copied["messages"][0]["role"] == "user"
    assert copied["config"]["model.path"] == "k3-nano"


def test_what_was_written_in_the_looks_of_a_token_is_no_token(page: Page, address, runs):
    place = first_with(runs / "one", lambda r: "<|open|>" in r["content"] and r["response_ids"])
    page.goto(f"{address}/#/rollout/{place}")
    said = page.locator(".channel.response .prose")
    expect(said).to_contain_text("<|open|>")
    expect(said.locator(".special")).to_have_count(0)
    page.locator("[data-mode=tokens]").click()
    expect(page.locator(".t.special", has_text="<|close|>").first).to_be_visible()
    assert page.title() == "k3rl view"


def test_a_judges_trace_is_laid_open(page: Page, address, runs):
    place = first_with(runs / "one", lambda r: r["domain"] == "words" and r["judge_trace_json"])
    page.goto(f"{address}/#/rollout/{place}")
    judge = page.locator(".card", has=page.get_by_role("heading", name="Judge"))
    expect(judge).to_contain_text("correct")
    judge.get_by_text("Scorepad").click()
    expect(judge).to_contain_text("First I read both answers.")
    judge.locator(".judgement summary").first.click()
    expect(judge).to_contain_text("The sum is right.")
    expect(judge).to_contain_text("(this one)")
    assert page.locator("main img").count() == 0


TOKENS = 100_000
PER_TOKEN = ("response_ids", "sampled_mask", "channels", "logprobs", "policy_versions", "token_advantages")
PER_TOKEN += ("trainer_logprobs", "teacher_logprobs")


def lengthen(file: Path) -> str:
    """One agent's rollout of a file, repeated until it has 100,000 tokens. Returns its place."""
    rows, schema = pq.read_table(file).to_pylist(), pq.read_schema(file)
    row = next(r for r in rows if r["domain"] == "agent" and r["sample"] == 2)
    times = -(-TOKENS // len(row["response_ids"]))
    for name in PER_TOKEN:
        row[name] = (row[name] * times)[:TOKENS]
    row["response_text"] *= times
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
    return f"{row['step']}/{row['draw']}/{row['sample']}"


def scroll_to(page: Page, share: float) -> None:
    page.locator(".middle").evaluate(
        "(element, s) => { element.scrollTop = s * element.scrollHeight }", share
    )


def test_a_hundred_thousand_tokens_scroll_like_a_hundred(page: Page, tmp_path):
    write_run(tmp_path / "long", steps=1)
    place = lengthen(tmp_path / "long" / "rollouts" / "step-000000.parquet")
    with served(tmp_path / "long") as base:
        page.goto(f"{base}/#/rollouts")
        expect(rows_of(page).first).to_be_visible()
        start = time.monotonic()
        page.evaluate(f"location.hash = '#/rollout/long/{place}?mode=tokens'")
        expect(page.locator(".t[data-i='0']")).to_be_visible()
        assert time.monotonic() - start < 5, "seconds; under 1 on a machine that does nothing else"
        for share in (0.3, 0.7, 1.0):
            scroll_to(page, share)
            page.wait_for_timeout(300)
            assert page.locator(".t").count() < 5000
        scroll_to(page, 1.0)
        expect(page.locator(f".t[data-i='{TOKENS - 1}']")).to_be_visible()
        page.evaluate(f"location.hash = '#/rollout/long/{place}?mode=tokens&token=77777'")
        expect(page.locator(".t.chosen[data-i='77777']")).to_be_in_viewport()
        page.keyboard.press("ArrowRight")
        expect(page).to_have_url(re.compile("token=77778"))
        page.goto(f"{base}/#/rollouts")
        expect(rows_of(page).first).to_be_visible()
        page.evaluate(f"location.hash = '#/rollout/long/{place}'")
        expect(page.locator(".bubble.policy").first).to_be_visible()
        expect(page.get_by_text("more turns")).to_have_count(1)
        assert page.locator("main *").count() < 6000


def test_a_view_is_kept_under_a_name(page: Page, address):
    page.goto(
        f"{address}/#/rollouts?run=one&filter=step+%3D+2&sort=reward&descending=true&columns=step,reward,turns"
    )
    expect(rows_of(page)).to_have_count(24)
    page.get_by_text("Views", exact=True).click()
    page.get_by_label("Name of this view").fill("second step")
    page.get_by_role("button", name="Keep").click()
    kept = page.url
    page.goto(f"{address}/#/rollouts")
    page.reload()
    expect(rows_of(page)).to_have_count(100)
    page.get_by_text("Views", exact=True).click()
    page.get_by_role("link", name="second step").click()
    expect(page).to_have_url(kept)
    expect(rows_of(page)).to_have_count(24)
    expect(page.get_by_role("columnheader", name="reward")).to_have_attribute("aria-sort", "descending")


def test_sql_answers_with_rows_a_chart_and_links(page: Page, address):
    page.goto(f"{address}/#/sql")
    page.get_by_role("button", name="Reward and length by step").click()
    expect(page.get_by_role("figure", name="By step")).to_contain_text("of_budget")
    shot(page, "sql")
    query = page.get_by_label("SQL query")
    query.fill(
        "SELECT sample, problem_id FROM everything WHERE run = 'one' AND step = 1 ORDER BY draw, sample"
    )
    query.press("Control+Enter")
    table = page.get_by_role("table", name="Rows")
    expect(table.locator("tbody tr")).to_have_count(24)
    query.fill("DROP TABLE rollouts")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_contain_text("it should be one SELECT")
    query.fill("SELECT run, step, draw, sample FROM everything WHERE run = 'two' LIMIT 1")
    page.get_by_role("button", name="Run").click()
    expect(table.locator("tbody tr")).to_have_count(1)
    page.reload()
    table.get_by_role("link").click()
    expect(page).to_have_url(re.compile("#/rollout/two/"))


def test_messages_of_another_program_are_read_noted_and_exported(page: Page, tmp_path):
    question = {"role": "user", "content": "What is 2+2?"}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
    }
    talk = [question, call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "<b>4</b>"}]
    lines = [
        {"messages": talk, "reward": 1.0},
        {"messages": [question, {"role": "assistant", "content": "5"}]},
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served(file) as base:
        page.goto(f"{base}/#/rollouts")
        expect(rows_of(page)).to_have_count(2)
        rows_of(page).first.click()
        expect(page.locator(".call")).to_contain_text("add")
        expect(page.locator(".reading")).to_contain_text("<b>4</b>")
        page.keyboard.press("f")
        expect(page.locator("[data-flag=good]")).to_have_attribute("aria-pressed", "true")
        page.get_by_role("link", name="Notes").click()
        expect(page.locator(".note-item")).to_have_count(1)
        (said,) = saved_lines(page, "sft")
        assert [m["role"] for m in said["messages"]] == ["user", "assistant", "tool", "assistant"]
        for view in ("metrics", "cells", "findings", "problems", "sql"):
            page.goto(f"{base}/#/{view}")
            expect(page.locator("main h1")).to_be_visible()
            expect(page.locator("main .error")).to_have_count(0)
            expect(page.locator("main")).not_to_contain_text(re.compile("null|undefined|NaN"))


def test_rollouts_are_scored_again_and_what_cannot_be_is_marked(page: Page, address):
    page.goto(f"{address}/#/rollouts?run=one&filter=step+%3D+1")
    expect(rows_of(page)).to_have_count(24)
    page.get_by_role("link", name="Re-score these").click()
    page.get_by_label("Reward", exact=True).select_option("regex")
    page.get_by_label("Arguments").fill("nonsense")
    page.get_by_role("button", name="Score again").click()
    expect(page.get_by_role("alert")).to_contain_text("'nonsense' is not name = value")
    page.get_by_label("Arguments").fill('pattern = "1"')
    page.get_by_role("button", name="Score again").click()
    table = page.get_by_role("table", name="Before and after regex")
    expect(table.locator("tbody tr")).to_have_count(24, timeout=60_000)
    expect(page.get_by_role("group", name="Summary")).to_contain_text(re.compile(r"23\s*scored"))
    expect(table.locator(".meter.change").first).to_be_visible()
    shot(page, "rescore")
    expect(page.locator(".unreplayed")).not_to_have_count(0)
    expect(table.get_by_text("not replayed").first).to_be_visible()
    expect(page).to_have_url(re.compile("reward=regex"))
