"""Bundles open in a browser without a server, run nothing of what they show, and hold no secrets."""

import json
import re
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browsing import shot
from playwright.sync_api import expect
from typer.testing import CliRunner
from viewer_runs import RENDERER, write_run

from k3rl.cli import app
from k3rl.errors import UserError
from k3rl.viewer.bundle import write_bundle
from k3rl.viewer.redact import MARK, Redactor

SECRETS = [
    "sk-proj-abcdEFGH1234567890xyz",
    "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "AKIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "xoxb-123456789012-abcdefghij",
]


def data_of(page: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="bundle">(.*?)</script>', page, re.DOTALL).group(1)
    )


@pytest.mark.parametrize("secret", SECRETS)
def test_keys_are_found_wherever_they_stand(secret):
    assert Redactor({}).text(f"use {secret}, then go on") == f"use {MARK}, then go on"
    assert Redactor({}).text(secret) == MARK


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("API_KEY=abcdef123456", f"API_KEY={MARK}"),
        ('"password": "hunter2hunter2"', f'"password": "{MARK}"'),
        ("Authorization: Bearer abc.def-123456", f"Authorization: Bearer {MARK}"),
        ("curl https://me:pass99@host/x", f"curl https://{MARK}@host/x"),
        ("see /home/ada/run/x and /Users/bob/y", f"see /home/{MARK}/run/x and /Users/{MARK}/y"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- after", f"{MARK} after"),
        ("my own value s3cr3t-of-this-box!", f"my own value {MARK}!"),
        (
            "max_tokens = 12345678; the token of love; 2 + 2 = 4",
            "max_tokens = 12345678; the token of love; 2 + 2 = 4",
        ),
    ],
)
def test_what_is_called_a_secret_is_one(text, left):
    redactor = Redactor({"MY_TOKEN": "s3cr3t-of-this-box", "PATH": "my own value", "X_KEY": "short"})
    assert redactor.text(text) == left


def test_a_secret_in_pieces_and_under_a_name():
    redactor = Redactor({})
    pieces = ["say ", "sk-abc", "defghijkl", "mnopqrstuv", " twice"]
    assert redactor.pieces(pieces) == ["say ", MARK, "", "", " twice"]
    assert redactor.pieces(["x=1;tok", "en=ab", "cdefgh12 and"]) == ["x=1;tok", f"en={MARK}", " and"]
    assert redactor.everything({"api_key": "not-of-any-shape", "n": [1, None, "ok"]}) == {
        "api_key": MARK,
        "n": [1, None, "ok"],
    }
    assert redactor.count == 3


def test_text_made_to_be_slow_is_not():
    began = time.monotonic()
    for text in (
        "a-" * 100_000,
        "eyJ-" * 50_000,
        "token " * 50_000,
        "bearer " * 50_000,
        "-----BEGIN " * 20_000,
        "x" * 300_000,
    ):
        Redactor({}).text(text)
    assert time.monotonic() - began < 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", steps=2)
    file = folder / "one" / "rollouts" / "step-000001.parquet"
    rows = pq.read_table(file).to_pylist()
    ids = RENDERER.encode_prompt([{"role": "user", "content": f"my key is {SECRETS[0]}, keep it"}], [], None)
    n = len(ids)
    rows[0] |= {
        "response_ids": ids,
        "response_text": RENDERER.decode(ids),
        "content": f"</script><script>window.hacked=1</script> {SECRETS[1]}",
        "messages_json": json.dumps(
            [{"role": "user", "content": f"<img src=x onerror='window.hacked=1'> {SECRETS[2]}"}]
        ),
        "judge_trace_json": json.dumps({"api_key": "whatever-it-is", "note": "</script>"}),
        "sampled_mask": [True] * n,
        "channels": ["response"] * n,
        **{k: [-0.5] * n for k in ("logprobs", "trainer_logprobs", "teacher_logprobs", "token_advantages")},
        "policy_versions": [1] * n,
    }
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(file)), file)
    return folder / "one"


def test_no_secret_is_in_the_file(run, tmp_path):
    path, facts = write_bundle([run], tmp_path / "shared", "step = 1")
    text = path.read_text()
    for secret in SECRETS[:3]:
        assert secret not in text
        assert secret[:12] not in text
    assert "whatever-it-is" not in text
    assert str(run) not in text
    assert facts["redacted"] >= 4
    data = data_of(text)
    assert len(data["rollouts"]) == facts["rollouts"] == facts["total"] == 24
    tokens = next(r["tokens"] for r in data["rollouts"] if MARK in "".join(r["tokens"]["text"]))
    assert f"my key is {MARK}, keep it" in "".join(tokens["text"])
    hidden = [
        i for i, piece in zip(tokens["ids"], tokens["text"], strict=True) if MARK in piece or piece == ""
    ]
    assert hidden
    assert set(hidden) == {-1}
    assert SECRETS[0][8:] not in RENDERER.decode([i for i in tokens["ids"] if i >= 0])


def test_it_opens_without_a_server_and_runs_nothing_of_what_it_shows(run, tmp_path, page):
    path, _ = write_bundle([run], tmp_path / "shared", "step = 1", "reward")
    requests: list[str] = []
    page.on("request", lambda r: requests.append(r.url))
    page.goto(path.as_uri())
    rows = page.locator("tbody tr[data-rid]")
    page.goto(f"{path.as_uri()}#/rollouts?filter=window.hacked")
    expect(rows).to_have_count(1)
    shot(page, "bundle-table")
    rows.first.click()
    main = page.locator("main")
    expect(page.locator(".rollout-main")).to_be_visible()
    expect(main).to_contain_text(f"my key is {MARK}, keep it")
    expect(main).to_contain_text("onerror")
    page.locator("[data-mode=tokens]").click()
    page.locator(".t[data-i]").nth(3).hover()
    expect(page.locator(".inspector")).to_contain_text("log-prob")
    shot(page, "bundle")
    page.goto(f"{path.as_uri()}#/rollouts?sort=reward")
    expect(rows).to_have_count(24)
    rows.first.click()
    expect(page.locator(".rollout-main")).to_be_visible()
    here = page.url
    page.keyboard.press("n")
    page.wait_for_function("u => location.href !== u", arg=here)
    page.goto(f"{path.as_uri()}#/metrics")
    expect(page.get_by_role("figure", name="Gradient norm")).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img").count() == 0
    assert [r for r in requests if not r.startswith("file:")] == []


def test_charts_and_tables_by_step_need_no_server(run, tmp_path, page):
    write_run(tmp_path / "two", steps=3, seed=1)
    path, _ = write_bundle([run, tmp_path / "two"], tmp_path / "shared", "step = 1")
    page.goto(f"{path.as_uri()}#/metrics")
    for name in ("Reward", "Reward by domain", "Reward by effort", "Length against budget", "Staleness"):
        figure = page.get_by_role("figure", name=re.compile(f"^{name}"))
        expect(figure.first.locator("path.line")).not_to_have_count(0)
    reward = page.get_by_role("figure", name="Reward", exact=True)
    expect(reward.locator(".legend li")).to_have_text(["one", "two"])
    expect(page.get_by_role("region", name="Config differences")).to_have_count(0)  # no config is in it
    shot(page, "bundle-metrics")
    page.get_by_role("checkbox", name="two").click()
    expect(page.locator(".legend").filter(has_text="two")).to_have_count(0)
    expect(reward.locator("path.line")).to_have_count(1)
    reward.locator("svg.clickable").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"filter=step\+%3D\+1"))
    expect(page.locator("tbody tr[data-rid]")).to_have_count(24)  # of one run, of this step

    page.get_by_role("link", name="Domain × effort").click()
    table = page.get_by_role("table", name="reward by domain and effort")
    expect(table).to_contain_text("arithmetic")
    newest = table.inner_text()
    page.get_by_role("combobox", name="Step").select_option("0")
    expect(page.locator("main")).to_contain_text("step 0")
    assert table.inner_text() != newest
    page.get_by_role("combobox", name="Step").select_option("all")
    expect(page.locator("main")).to_contain_text("all 2 steps")
    shot(page, "bundle-cells")
    page.get_by_role("combobox", name="Step").select_option("1")
    expect(page.locator("main")).to_contain_text("step 1")
    cell = table.get_by_title("Its rollouts").first
    said = int(re.search(r"(\d+) rollouts", cell.inner_text()).group(1))
    cell.click()
    expect(page.locator("tbody tr[data-rid]")).to_have_count(said)


def test_the_command_and_its_refusals(run, tmp_path):
    done = CliRunner().invoke(
        app, ["view", str(run), "--bundle", str(tmp_path / "b"), "--filter", "reward >= 1", "--limit", "3"]
    )
    assert done.exit_code == 0, done.output
    assert "3 of " in done.output
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        write_bundle([run], tmp_path / "file")
    with pytest.raises(UserError, match="no rollouts are selected"):
        write_bundle([run], tmp_path / "none", "reward > 99")
    assert not (tmp_path / "none").exists()
