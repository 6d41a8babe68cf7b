"""Group, comparison, findings, notes: the viewer's further pages in a real headless Chromium."""

import re

from playwright.sync_api import Page, expect
from test_viewer_browser import address, browser, page, rows_of, runs, shot  # noqa: F401


def test_samples_of_a_group_stand_side_by_side_and_part_at_a_mark(page: Page, address):  # noqa: F811
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


def test_a_cell_of_domain_and_effort_leads_to_its_rollouts(page: Page, address):  # noqa: F811
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


def test_a_finding_shows_as_many_rollouts_as_it_counts(page: Page, address):  # noqa: F811
    page.goto(f"{address}/#/findings?run=one")
    loops = page.locator(".finding[data-name=tool_loops]")
    expect(loops).to_be_visible()
    shot(page, "findings")
    count = int(loops.locator("b").first.inner_text())
    loops.get_by_role("link").click()
    expect(page).to_have_url(re.compile("filter=repeated_calls"))
    expect(rows_of(page)).to_have_count(count)


def test_two_runs_are_compared_problem_by_problem(page: Page, address):  # noqa: F811
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
