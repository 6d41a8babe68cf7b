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
