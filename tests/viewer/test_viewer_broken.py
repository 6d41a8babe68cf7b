"""Files that are cut, odd, empty, or being written: named in a sentence, with everything else shown."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from rich.console import Console
from viewer_runs import write_run, write_step

from k3rl.errors import UserError
from k3rl.store import RunStore
from k3rl.viewer.server import make_app
from k3rl.viewer.session import Session
from k3rl.viewer.text import show_text


@pytest.fixture
def opened():
    """Opens folders as the viewer does; everything on disk is read when it returns."""
    sessions = []

    def open_(*paths: Path) -> TestClient:
        session = Session(list(paths))
        sessions.append(session)
        read(session)
        client = TestClient(make_app(session), base_url="http://localhost", raise_server_exceptions=False)
        client.session = session
        return client

    yield open_
    for session in sessions:
        session.__exit__(None, None, None)


def read(session: Session) -> None:
    session.read_all()


ADDRESSES = [
    "state",
    "columns",
    "metrics?run={run}",
    "metrics?run={run}&name=reward/mean",
    "steps?run={run}",
    "configs?run={run}",
    "rollouts?run={run}",
    "rollouts?run={run}&filter=%22I+take%22",
    "cells?run={run}",
    "degeneracies?run={run}",
    "compare/problems?run={run}",
    "compare?run={run}&problem_id=sum-001",
    "export?run={run}&format=csv",
    "export?run={run}&format=parquet",
]


def all_answer(client: TestClient, run: str) -> None:
    """No address fails; what is refused is refused in a sentence."""
    for address in ADDRESSES:
        reply = client.get(f"/api/{address.format(run=run)}")
        assert reply.status_code in (200, 400), (address, reply.text)
        if reply.status_code == 400:
            error = reply.json()["error"]
            assert "Traceback" not in error
            assert "\n" not in error


def broken(client: TestClient, run: str) -> dict[str, str]:
    runs = {r["name"]: r for r in client.get("/api/state").json()["runs"]}
    return {b["file"]: b["reason"] for b in runs[run]["broken"]}


@pytest.mark.parametrize("part", ["nothing", "magic", "half", "all but the end", "zeros in the middle"])
def test_a_file_cut_anywhere_is_named(opened, tmp_path, part):
    write_run(tmp_path / "run", steps=3)
    file = tmp_path / "run" / "rollouts" / "step-000001.parquet"
    whole = file.read_bytes()
    n = len(whole)
    cut = {
        "nothing": b"",
        "magic": whole[:4],
        "half": whole[: n // 2],
        "all but the end": whole[:-1],
        "zeros in the middle": whole[: n // 8] + bytes(n // 2) + whole[n // 8 + n // 2 :],
    }[part]
    file.write_bytes(cut)
    client = opened(tmp_path / "run")
    all_answer(client, "run")
    assert list(broken(client, "run")) == ["step-000001.parquet"]
    assert str(tmp_path) not in broken(client, "run")["step-000001.parquet"]
    page = client.get("/api/rollouts").json()
    steps = {r["step"] for r in page["rows"]}
    # a hole in the tokens leaves the columns before it whole
    assert steps in ({0, 2}, {0, 1, 2} if part == "zeros in the middle" else {0, 2})
    file.write_bytes(whole)  # as a copy that has ended
    read(client.session)
    assert broken(client, "run") == {}
    assert client.get("/api/rollouts").json()["total"] == 72


def test_tokens_that_were_damaged_later_are_named_when_asked_for(opened, tmp_path):
    write_run(tmp_path / "run", steps=1)
    client = opened(tmp_path / "run")
    row = client.get("/api/rollouts").json()["rows"][0]
    file = tmp_path / "run" / "rollouts" / "step-000000.parquet"
    file.write_bytes(file.read_bytes()[:3000])
    key = {name: row[name] for name in ("run", "step", "draw", "sample")}
    for path in ("rollout", "group"):
        reply = client.get(f"/api/{path}", params=key)
        assert reply.status_code == 400, reply.text
        assert "step-000000.parquet cannot be read" in reply.json()["error"]
    reply = client.get("/api/export", params={"run": "run"})
    assert reply.status_code == 400, reply.text
    assert "step-000000.parquet" in reply.json()["error"]


def test_columns_that_nobody_knows_are_columns(opened, tmp_path):
    write_run(tmp_path / "run", steps=2)
    file = tmp_path / "run" / "rollouts" / "step-000001.parquet"
    table = pq.read_table(file)
    for name, values in {
        "my score": pa.array(np.linspace(0, 1, len(table))),
        "sélecté": pa.array([True] * len(table)),
        'quo"te': pa.array(["a"] * len(table)),
        "nested": pa.array([{"a": [1]}] * len(table)),
        "blob": pa.array([b"\x00\xff"] * len(table)),
        "order": pa.array([1] * len(table)),
    }.items():
        table = table.append_column(name, values)
    pq.write_table(table, file)
    client = opened(tmp_path / "run")
    all_answer(client, "run")
    assert broken(client, "run") == {}
    for filter, count in (
        ("`my score` > 0.5", 12),
        ("`sélecté` = true", 24),
        ('`quo"te` = a', 24),
        ("order = 1", 24),
    ):
        reply = client.get("/api/rollouts", params={"filter": filter})
        assert reply.json()["total"] == count, (filter, reply.text)
    row = client.get("/api/rollouts", params={"filter": "step = 1"}).json()["rows"][0]
    whole = client.get("/api/rollout", params={k: row[k] for k in ("run", "step", "draw", "sample")})
    assert whole.status_code == 200, whole.text
    assert whole.json()["extra"]["nested"] == {"a": [1]}


def test_columns_of_another_type_or_lacking(opened, tmp_path):
    write_run(tmp_path / "run", steps=3)
    folder = tmp_path / "run" / "rollouts"
    table = pq.read_table(folder / "step-000000.parquet")
    text = pa.array([f"{r}" for r in table["reward"].to_pylist()])
    odd = table.set_column(table.column_names.index("reward"), "reward", text)
    pq.write_table(odd.drop_columns(["logprobs", "effort", "channels"]), folder / "step-000000.parquet")
    few = pq.read_table(folder / "step-000001.parquet").select(["step", "draw", "sample"])
    pq.write_table(few, folder / "step-000001.parquet")
    pq.write_table(table.drop_columns(["draw"]), folder / "step-000002.parquet")
    client = opened(tmp_path / "run")
    all_answer(client, "run")
    assert broken(client, "run") == {"step-000002.parquet": "it lacks the columns draw"}
    assert client.get("/api/rollouts").json()["total"] == 48
    for row in client.get("/api/rollouts").json()["rows"]:
        key = {name: row[name] for name in ("run", "step", "draw", "sample")}
        reply = client.get("/api/rollout", params=key)
        assert reply.status_code == 200, reply.text


def test_an_empty_run_and_one_that_has_only_begun(opened, tmp_path):
    store = write_run(tmp_path / "begun", steps=0, close=False)
    (tmp_path / "bare" / "rollouts").mkdir(parents=True)
    client = opened(tmp_path)
    for run in ("begun", "bare"):
        all_answer(client, run)
        assert client.get("/api/cells", params={"run": run}).json()["cells"] == []
        assert client.get("/api/rollouts", params={"run": run}).json()["total"] == 0
    temporary = store.path / "rollouts" / ".step-000000.parquet.1.tmp"
    temporary.parent.mkdir(exist_ok=True)
    temporary.write_bytes(b"PAR1 half")
    read(client.session)
    assert broken(client, "begun") == {}
    write_step(RunStore(store.path), 0, metrics=False)
    read(client.session)
    all_answer(client, "begun")
    (run,) = [r for r in client.get("/api/state").json()["runs"] if r["name"] == "begun"]
    assert run["rollouts"] == 24
    store.close()


def test_a_file_without_rows(opened, tmp_path):
    write_run(tmp_path / "run", steps=2)
    file = tmp_path / "run" / "rollouts" / "step-000001.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    client = opened(tmp_path / "run")
    all_answer(client, "run")
    assert broken(client, "run") == {}
    assert client.get("/api/rollouts").json()["total"] == 24


def test_damaged_files_beside_the_rollouts_are_named(opened, tmp_path):
    write_run(tmp_path / "run", steps=2)
    (tmp_path / "run" / "status.json").write_text('{"state": "runn')
    (tmp_path / "run" / "config.yaml").write_text("kind: [rl\n")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "metrics.jsonl").write_text("{nonsense\n" + lines)
    client = opened(tmp_path / "run")
    all_answer(client, "run")
    said = broken(client, "run")
    assert set(said) >= {"status.json", "config.yaml", "metrics.jsonl"}
    assert client.get("/api/rollouts").json()["total"] == 48
    row = client.get("/api/rollouts").json()["rows"][0]
    key = {name: row[name] for name in ("run", "step", "draw", "sample")}
    assert client.get("/api/rollout", params=key).status_code == 200
    reply = client.get("/api/configs", params={"run": "run"})
    assert "config.yaml" in reply.json()["error"]
    console = Console(file=io.StringIO(), width=200)
    show_text([tmp_path / "run"], console=console)
    printed = console.file.getvalue()
    assert "run: status.json cannot be read" in printed
    assert "run: metrics.jsonl cannot be read" in printed
    assert "48 rollouts" in printed


def test_json_inside_a_row_that_cannot_be_read_is_shown_as_it_is(opened, tmp_path):
    write_run(tmp_path / "run", steps=1)
    file = tmp_path / "run" / "rollouts" / "step-000000.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[0] |= {"messages_json": '[{"role": ', "judge_trace_json": "{", "reward": float("nan")}
    rows[1] |= {"messages_json": json.dumps([1, {"role": "user", "content": [{"text": None}]}])}
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(file)), file)
    client = opened(tmp_path / "run")
    all_answer(client, "run")
    for row in client.get("/api/rollouts").json()["rows"]:
        key = {name: row[name] for name in ("run", "step", "draw", "sample")}
        assert client.get("/api/rollout", params=key).status_code == 200
    assert client.get("/api/excerpts", params={"rid": [row["rid"]]}).status_code == 200


def test_steps_that_a_resumed_run_takes_back_go(opened, tmp_path):
    write_run(tmp_path / "run", steps=4)
    client = opened(tmp_path / "run")
    rows = client.get("/api/rollouts", params={"filter": "step = 3"}).json()["rows"]
    RunStore(tmp_path / "run").truncate_after(1)
    key = {name: rows[0][name] for name in ("run", "step", "draw", "sample")}
    reply = client.get("/api/rollout", params=key)  # before it was noticed
    assert reply.status_code == 400
    assert "step-000003.parquet" in reply.json()["error"]
    read(client.session)
    reply = client.get("/api/rollout", params=key)
    assert "holds no rollout" in reply.json()["error"]
    assert client.get("/api/cells", params={"run": "run"}).json()["steps"] == [0, 1]


def test_nothing_to_open_is_said_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no run, file or folder"):
        Session([tmp_path / "nowhere"])


def test_the_viewer_starts_without_what_trains():
    code = "import sys, k3rl.cli, k3rl.viewer; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
