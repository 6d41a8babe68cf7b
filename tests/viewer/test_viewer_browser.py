"""The viewer in a real headless Chromium, over runs that the real store wrote. Screenshots go to artifacts/viewer."""

import csv
import io
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from browsing import rows_of, served, shot
from datasets import load_from_disk
from playwright.sync_api import expect
from viewer_runs import write_run, write_step

from k3rl.store import RunStore


def test_metrics_of_several_runs_are_drawn_over_each_other(page, address):
    page.goto(f"{address}/#/metrics")
    expect(page.get_by_role("figure", name="Reward", exact=True)).to_be_visible()
    for panel in (
        "Reward by domain",
        "Length against budget",
        "Staleness",
        "Phase times",
        "Health of the judge",
    ):
        expect(page.get_by_role("figure").filter(has_text=panel).first).to_be_visible()
    expect(page.locator(".runs")).to_contain_text("one")
    expect(page.locator(".runs")).to_contain_text("two")
    assert page.locator("main svg path, main svg polyline").count() > 4
    shot(page, "metrics")


def test_filter_sort_and_search_change_the_table(page, address):
    page.goto(f"{address}/#/rollouts")
    expect(rows_of(page).first).to_be_visible()
    everything = page.locator("main").inner_text()
    box = page.locator("main input").first
    box.fill("reward >= 1 and step = 1")
    box.press("Enter")
    page.wait_for_function("t => document.querySelector('main').innerText !== t", arg=everything)
    expect(page).to_have_url(re.compile("filter="))
    expect(page.locator("main")).to_contain_text(re.compile("rollouts"))
    expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
    expect(rows_of(page).first).to_be_visible()
    texts = rows_of(page).all_inner_texts()
    page.get_by_role("columnheader", name="sampled tokens").get_by_role("button").first.click()
    expect(page).to_have_url(re.compile("sort=sampled_tokens"))
    shot(page, "table")
    page.reload()
    expect(rows_of(page).first).to_be_visible()
    assert len(rows_of(page).all_inner_texts()) == len(texts)


def test_a_filter_that_makes_no_sense_is_explained(page, address):
    reply = urllib.request.Request(f"{address}/api/rollouts?filter=rewrd%20%3E%201")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(reply)
    assert error.value.code == 400
    assert "there is no column 'rewrd'; did you mean 'reward'" in error.value.read().decode()


def test_one_rollout_shows_channels_and_tokens_with_their_numbers(page, address):
    page.goto(f"{address}/#/rollouts?filter=step+%3D+1")
    rows_of(page).first.click()
    expect(page.locator(".rollout-main")).to_be_visible()
    expect(page.locator("main")).not_to_contain_text("undefined")
    expect(page.locator(".rollout-side")).to_contain_text("SEGMENTS", ignore_case=True)
    page.locator("[data-mode=tokens]").click()
    token = page.locator(".t[data-i]:not(.given)").nth(3)
    expect(token).to_be_visible()
    token.hover()
    expect(page.locator(".inspector")).to_contain_text("log-prob")
    page.get_by_role("radio", name="advantage").click()
    expect(page).to_have_url(re.compile("colour=advantage"))
    shot(page, "rollout")
    first = page.url
    page.keyboard.press("n")
    page.wait_for_function("u => location.href !== u", arg=first)


def test_html_in_a_rollout_is_text(page, address):
    page.goto(f"{address}/#/rollouts?filter=content+~+%22window.hacked%22")
    expect(rows_of(page)).to_have_count(1)
    rows_of(page).first.click()
    expect(page.locator(".rollout-main")).to_be_visible()
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img[src=x]").count() == 0


def test_a_flag_is_kept_beside_the_run(page, address, runs):
    page.goto(f"{address}/#/rollouts?filter=step+%3D+2")
    rows_of(page).first.click()
    page.locator("[data-flag=good]").click()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not list(runs.glob("*/notes.jsonl")):
        time.sleep(0.1)
    (file,) = runs.glob("*/notes.jsonl")
    assert json.loads(file.read_text().splitlines()[-1])["flag"] == "good"


def test_a_selection_is_exported_in_its_order(address, runs):
    def fetch(form: str) -> bytes:
        query = "run=one&filter=step%20%3D%201&sort=reward&descending=true"
        return urllib.request.urlopen(f"{address}/api/export?{query}&format={form}").read()

    table = pq.read_table(io.BytesIO(fetch("parquet")))
    stored = pq.read_table(runs / "one" / "rollouts" / "step-000001.parquet").to_pylist()
    assert table.num_rows == len(stored)
    rewards = [r for r in table["reward"].to_pylist() if r is not None]
    assert rewards == sorted(rewards, reverse=True)
    key = lambda r: (r["draw"], r["sample"])  # noqa: E731
    assert sorted(table.to_pylist(), key=key) == sorted(stored, key=key)
    lines = [json.loads(line) for line in fetch("jsonl").splitlines()]
    assert [key(r) for r in lines] == [key(r) for r in table.to_pylist()]
    cells = list(csv.DictReader(io.StringIO(fetch("csv").decode())))
    assert [int(c["draw"]) for c in cells] == [r["draw"] for r in lines]
    assert "logprobs" not in cells[0]


def test_a_run_that_is_written_shows_its_new_step(page, browser, tmp_path):
    write_run(tmp_path / "live", steps=2)
    with served(tmp_path / "live") as address:
        page.goto(f"{address}/#/rollouts?filter=step+%3D+7")
        page.wait_for_timeout(1500)
        assert rows_of(page).count() == 0
        write_step(RunStore.open(tmp_path / "live"), 7)
        expect(rows_of(page).first).to_be_visible(timeout=15_000)


def test_a_damaged_file_is_named_and_everything_else_is_shown(page, tmp_path):
    write_run(tmp_path / "cut", steps=3)
    file = tmp_path / "cut" / "rollouts" / "step-000001.parquet"
    file.write_bytes(file.read_bytes()[:2000])
    with served(tmp_path / "cut") as address:
        page.goto(f"{address}/#/rollouts")
        expect(page.get_by_text("step-000001.parquet cannot be read")).to_be_visible(timeout=15_000)
        expect(rows_of(page).first).to_be_visible()


def test_strangers_get_nothing(address):
    request = urllib.request.Request(f"{address}/api/state", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == 403


def test_the_terminal_lists_and_shows(runs):
    command = [sys.executable, "-m", "k3rl.cli", "view", "--text", str(runs / "one")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "step" in listed
    assert "reward" in listed


def test_a_step_of_a_chart_leads_to_its_rollouts(page, address):
    page.goto(f"{address}/#/metrics")
    configs = page.get_by_role("region", name="Config differences")
    expect(configs).to_contain_text("seed")
    expect(configs.get_by_role("row").filter(has_text="seed")).to_contain_text("1")
    picture = page.get_by_role("figure", name="Reward", exact=True).locator("svg.clickable")
    picture.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".readout:visible")).to_contain_text("step 1")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"filter=step\+%3D\+1"))
    expect(rows_of(page).first).to_be_visible()


def test_words_are_searched_in_all_texts(page, address):
    page.goto(f"{address}/#/rollouts?run=one")
    page.get_by_label("Search all texts").fill("window.hacked")
    page.keyboard.press("Enter")
    expect(rows_of(page)).to_have_count(1)
    expect(page.get_by_label("Filter", exact=True)).to_have_value('text ~ "window.hacked"')


def test_the_filter_offers_columns_and_values(page, address):
    page.goto(f"{address}/#/rollouts")
    box = page.get_by_label("Filter", exact=True)
    box.fill("eff")
    expect(page.get_by_role("option", name="effort")).to_be_visible()
    page.keyboard.press("Tab")
    box.type("= ")
    expect(page.get_by_role("option", name='"max"')).to_be_visible()
    box.type("ma")
    page.keyboard.press("Tab")
    expect(box).to_have_value('effort = "max" ')
    box.fill("rewrd > 1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("did you mean 'reward'")


def test_the_selection_is_downloaded(page, address):
    page.goto(f"{address}/#/rollouts?run=two&filter=step+%3D+1")
    page.get_by_text("Export", exact=True).click()
    with page.expect_download() as download:
        page.locator("[data-format=jsonl]").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 24
    assert {json.loads(line)["step"] for line in lines} == {1}


def test_the_selection_is_downloaded_as_a_datasets_set(page, address, tmp_path):
    page.goto(f"{address}/#/rollouts?run=two&filter=step+%3D+1&sort=reward&descending=true")
    page.get_by_text("Export", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="datasets folder, zipped").click()
    assert download.value.suggested_filename == "rollouts.zip"
    with zipfile.ZipFile(download.value.path()) as packed:
        packed.extractall(tmp_path)
    found = load_from_disk(str(tmp_path / "rollouts"))
    assert set(found["step"]) == {1}
    assert len(found) == 24
    rewards = [r for r in found["reward"] if r is not None]
    assert rewards == sorted(rewards, reverse=True)
    assert len(found[0]["logprobs"]) == len(found[0]["response_ids"])


def test_every_page_works_from_the_keyboard_and_is_named(page, address):
    page.goto(f"{address}/#/rollouts?run=one")
    expect(rows_of(page).first).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator(".rollout-main")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    expect(rows_of(page).first).to_be_visible()
    for view in ("metrics", "rollouts", "cells", "findings", "problems", "notes"):
        page.goto(f"{address}/#/{view}")
        expect(page.locator("main h1")).to_be_visible()
        unnamed = page.locator("button, a, input, select, textarea, svg[role=img], canvas").evaluate_all(
            """all => all.filter(e => !e.ariaLabel && !e.title && !e.textContent.trim() && !e.closest("label"))
                .map(e => e.outerHTML.slice(0, 120))"""
        )
        assert unnamed == []


# Of all visible text: the least ratio of WCAG 2, against the background that is seen behind it.
LEAST_CONTRAST = """() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (css) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = css;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const over = (top, under) => [0, 1, 2].map((i) => (top[i] * top[3] + under[i] * (255 - top[3])) / 255).concat(255);
  const behind = (e) => {
    const own = rgba(getComputedStyle(e).backgroundColor);
    return own[3] === 255 || !e.parentElement ? own : over(own, behind(e.parentElement));
  };
  const ratio = (e) => {
    const back = behind(e);
    const [a, b] = [light(over(rgba(getComputedStyle(e).color), back)), light(back)].sort((x, y) => y - x);
    return { ratio: (a + 0.05) / (b + 0.05), what: e.outerHTML.slice(0, 140) };
  };
  const speaks = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.checkVisibility();
  const read = (e) => !e.matches(":disabled, .disabled, option") && !e.closest("svg, .off");
  const found = [...document.querySelectorAll("body *")].filter((e) => speaks(e) && read(e)).map(ratio);
  return found.sort((a, b) => a.ratio - b.ratio)[0];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page, address, scheme):
    page.emulate_media(color_scheme=scheme)
    for view in (
        "metrics",
        "rollouts",
        "cells",
        "findings",
        "problems",
        "rollout/one/1/6/0",
        "group/one/1/6",
    ):
        page.goto(f"{address}/#/{view}")
        expect(page.locator("main h1")).to_be_visible()
        page.wait_for_timeout(300)
        shot(page, f"{view.split('/')[0]}-{scheme}")
        least = page.evaluate(LEAST_CONTRAST)
        assert least["ratio"] >= 4.5, least
