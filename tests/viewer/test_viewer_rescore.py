"""Stored rollouts scored again: by the right reward, only where it can be, in a process that ends."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from viewer_runs import write_run

from k3rl.errors import UserError
from k3rl.viewer.queries import Selection
from k3rl.viewer.replay import job_of, replay
from k3rl.viewer.rescore import Job, rescore
from k3rl.viewer.server import make_app
from k3rl.viewer.session import Session

REWARDS = """
import time
from rewards import Score, reward

@reward(name="shorter", depends="content")
def shorter(scored, limit: int = 10):
    return Score(float(len(scored.content) <= limit), {"length": 1.0}, f"{len(scored.content)} characters")

@reward(name="looks_around")
def looks_around(scored):
    return 1.0

@reward(name="best_of_group", scope="group", depends="content")
def best_of_group(all_of_them):
    longest = max(len(s.content) for s in all_of_them)
    return [float(len(s.content) == longest) for s in all_of_them]

@reward(name="compares_everything", scope="group")
def compares_everything(all_of_them):
    return [0.0 for _ in all_of_them]

@reward(name="sleeps", depends="content", timeout_s=100)
def sleeps(scored):
    time.sleep(100)

@reward(name="breaks_down", depends="content")
def breaks_down(scored):
    raise RuntimeError("no such thing")
"""
NAMES = ("shorter", "looks_around", "best_of_group", "compares_everything", "sleeps", "breaks_down")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", steps=2)
    (folder / "mine.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="module")
def session(folder):
    session = Session([folder / "one"], rewards=NAMES, modules=(str(folder / "mine.py"),))
    session.read_all()
    yield session
    session.__exit__(None, None, None)


def score(session, reward: str, filter: str = "", limit: int = 200, **more) -> dict:
    """In this process: the server's way, through another one, is under test below."""
    more = {"modules": session.modules, **more}
    return rescore(Job(**job_of(session.queries, Selection((), filter), reward, limit, **more)))


def served(session, reward: str, arguments: dict | None = None, filter: str = "", **more) -> dict:
    own = {"extra": session.rewards, "modules": session.modules, **more}
    return replay(session.queries, Selection((), filter), reward, arguments or {}, **own)


def stored(folder: Path) -> dict[tuple[int, int], dict]:
    files = sorted((folder / "one" / "rollouts").glob("*.parquet"))
    return {(r["draw"], r["sample"]): r for f in files for r in pq.read_table(f).to_pylist()}


def test_the_same_reward_gives_what_the_store_says(session, folder):
    said = score(session, "problem", "domain = agent and reward is not null and status = complete")
    assert (
        said["summary"]["replayed"] == len(said["rows"]) > 0
    )  # `exact` reads the answer alone, sandbox or not
    assert said["summary"]["changed"] == 0
    rows = stored(folder)
    for row in said["rows"]:
        before = rows[row["draw"], row["sample"]]
        assert row["before"] == before["reward"]
        assert row["components_before"] == {p["name"]: p["value"] for p in before["reward_components"]}
        assert row["after"] == row["task_before"] == row["components_before"]["task"]
    assert {r["after"] for r in said["rows"]} == {0.0, 1.0}
    said = score(session, "problem", "status = failed")
    assert {r["reason"] for r in said["rows"]} == {"the rollout failed: it is not graded"}
    assert said["summary"]["not_replayed"] == {"the rollout failed: it is not graded": len(said["rows"])}


def test_a_changed_reward_stands_beside_the_stored_one(session, folder):
    said = score(session, "shorter", "step = 1", arguments={"limit": 8})
    rows = stored(folder)
    done = [r for r in said["rows"] if r["replayed"]]
    assert done
    for row in done:
        content = rows[row["draw"], row["sample"]]["content"]
        assert row["after"] == float(len(content) <= 8)
        assert row["components_after"] == {"length": 1.0}
        assert row["explanation_after"] == f"{len(content)} characters"
        if row["task_before"] is not None:
            assert row["change"] == row["after"] - row["task_before"]
    assert said["summary"]["changed"] == sum(r["change"] not in (None, 0.0) for r in done)


def test_what_cannot_be_replayed_says_why(session, folder):
    said = score(session, "looks_around")
    by_domain: dict[str, set] = {}
    rows = stored(folder)
    for row in said["rows"]:
        kept = rows[row["draw"], row["sample"]]
        if kept["status"] != "failed":
            by_domain.setdefault(kept["domain"], set()).add((row["replayed"], row["reason"], row["after"]))
    lost = "it had a sandbox, whose state is lost, and the reward may look at it"
    assert by_domain["agent"] == {(False, lost, None)}
    assert by_domain["arithmetic"] == {(True, "", 1.0)}
    said = score(session, "looks_around", "domain = agent and status != failed", text_only=True)
    assert all(r["replayed"] for r in said["rows"])


def test_a_group_is_compared_as_a_whole_or_not_at_all(session, folder):
    said = score(session, "best_of_group", "domain = words and sample = 1")
    rows = stored(folder)
    for row in (r for r in said["rows"] if r["replayed"]):
        group = [r for k, r in rows.items() if k[0] == row["draw"] and r["status"] != "failed"]
        longest = max(len(r["content"]) for r in group)
        assert row["after"] == float(len(rows[row["draw"], 1]["content"]) == longest)
    assert {r["sample"] for r in said["rows"]} == {1}
    said = score(session, "compares_everything", "domain = agent")
    assert not any(r["replayed"] for r in said["rows"])


def test_a_reward_that_fails_is_told_from_one_that_says_zero(session):
    said = score(session, "breaks_down", "domain = words and status != failed", limit=3)
    assert [r["after"] for r in said["rows"]] == [None] * 3
    assert all("RuntimeError: no such thing" in r["reason"] for r in said["rows"])
    assert said["summary"]["mean_after"] is None


def test_what_takes_too_long_is_stopped(session):
    with pytest.raises(UserError, match=r"longer than 8 s and was stopped"):
        served(session, "sleeps", limit=2, limit_s=8)


def test_rewards_that_were_not_offered_are_refused(session, folder):
    with pytest.raises(UserError, match="exct"):
        score(session, "exct")
    for name in (f"{folder}/mine.py:shorter", "http://127.0.0.1:1/x", "grm", "os:system"):
        with pytest.raises(UserError, match="the viewer was not started with --reward"):
            served(session, name)
    with pytest.raises(UserError, match="the argument 'limit' should be a number"):
        served(session, "shorter", {"limit": {"type": "rule", "function": "os:system"}})
    with pytest.raises(UserError, match="no rollouts are selected"):
        served(session, "shorter", filter="reward > 99")


def test_over_http(session):
    with TestClient(make_app(session), base_url="http://localhost") as client:
        assert {"problem", "exact", "shorter"} <= set(client.get("/api/rewards").json()["rewards"])
        body = {
            "filter": "step = 0 and domain = words",
            "reward": "shorter",
            "arguments": {"limit": 5},
            "limit": 4,
        }
        assert client.post("/api/rescore", json=body).status_code == 403
        reply = client.post("/api/rescore", json=body, headers={"X-K3RL": "1"})
        assert reply.status_code == 200, reply.text
        assert reply.json()["summary"]["rollouts"] == 4
        assert {r["outcome"] for r in reply.json()["rows"]} == {"scored"}


def test_an_argument_that_the_reward_does_not_take_is_the_reason(session):
    said = score(session, "shorter", limit=2, arguments={"x": 1})
    assert all("takes no 'x'" in r["reason"] for r in said["rows"])


def test_from_the_command_line(folder):
    command = [sys.executable, "-m", "k3rl.cli", "rewards", "rescore", str(folder / "one")]
    chosen = ["--reward", f"{folder}/mine.py:shorter", "--set", "limit=8", "--filter", "step = 1"]
    out = folder / "rescored.jsonl"
    printed = subprocess.run([*command, *chosen, "--out", str(out)], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    assert "mean before" in printed.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["step"] for r in rows} == {1}


def test_problems_that_the_data_has_lost_are_marked(folder, tmp_path):
    write_run(tmp_path / "run", steps=1)
    (tmp_path / "problems.jsonl").write_text(
        json.dumps(
            {"id": "other", "messages": [{"role": "user", "content": "?"}], "reward": {"name": "exact"}}
        )
        + "\n"
    )
    session = Session([tmp_path / "run"])
    session.read_all()
    try:
        said = score(session, "problem", "status != failed")
    finally:
        session.__exit__(None, None, None)
    assert set(said["summary"]["not_replayed"]) == {
        "the data does not say any more what the problem's reward is"
    }


def test_files_without_tokens_are_refused_in_a_sentence(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "completion": "b"}]), tmp_path / "a.parquet")
    session = Session([tmp_path / "a.parquet"])
    session.read_all()
    try:
        with pytest.raises(UserError, match="holds no rollouts of a run"):
            score(session, "exact", arguments={"answer": "b"})
    finally:
        session.__exit__(None, None, None)
