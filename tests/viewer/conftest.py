"""Runs that the real store wrote, a viewer that serves them, and a real headless Chromium."""

import json
import os
import time
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browsing import served
from playwright.sync_api import sync_playwright
from viewer_runs import write_run

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> <|open|>'


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", steps=4)
    write_run(folder / "two", steps=3, seed=1)
    file = sorted((folder / "one" / "rollouts").glob("*.parquet"))[-1]
    rows = pq.read_table(file).to_pylist()
    rows[0]["response_text"] = rows[0]["content"] = HOSTILE
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(file)), file)
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served(runs) as address:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            state = json.load(urllib.request.urlopen(f"{address}/api/state"))
            if state["reading"]["done"] == state["reading"]["total"] > 0:
                break
            time.sleep(0.2)
        yield address


@pytest.fixture(scope="module")  # while playwright is there, asyncio runs nothing else in its thread
def browser():
    with sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    # a page may ask once more after its test has ended its server; a refused filter is told on the page
    told = ("ERR_CONNECTION_REFUSED", "400 (Bad Request)")

    def hear(message) -> None:
        if message.type == "error" and not any(t in message.text for t in told):
            errors.append(message.text)

    page.on("console", hear)
    yield page
    page.close()
    assert not errors, errors
