"""The viewer's numbers against the same numbers computed row by row in Python."""

import csv
import io
import json
import statistics
import zipfile
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import load_from_disk
from fastapi.testclient import TestClient
from viewer_runs import write_run

from k3rl.viewer.server import make_app
from k3rl.viewer.session import Session


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", steps=6)
    write_run(folder / "two", steps=3, seed=1, skill=0.8)
    return folder


@pytest.fixture(scope="module")
def client(folder):
    session = Session([folder])
    session.read_all()
    with TestClient(make_app(session), base_url="http://localhost") as client:
        yield client
    session.__exit__(None, None, None)


def rows_of(folder: Path, run: str) -> list[dict]:
    return [
        r for f in sorted((folder / run / "rollouts").glob("*.parquet")) for r in pq.read_table(f).to_pylist()
    ]


def groups_of(rows: list[dict]) -> dict[tuple[int, int], list[dict]]:
    found = defaultdict(list)
    for row in rows:
        found[row["step"], row["draw"]].append(row)
    return found


def get(client, path: str, **params) -> dict:
    reply = client.get(path, params=params)
    assert reply.status_code == 200, reply.text
    return reply.json()


def selected(client, run: str, filter: str) -> list[dict]:
    page = get(client, "/api/rollouts", run=run, filter=filter, limit=1000)
    assert page["total"] == len(page["rows"])
    return page["rows"]


def mean(values) -> float | None:
    values = [v for v in values if v is not None]
    return statistics.fmean(values) if values else None


@pytest.mark.parametrize("step", [None, 2])
def test_cells_are_what_their_rows_say(client, folder, step):
    rows = rows_of(folder, "one")
    said = get(client, "/api/cells", run="one", **({"whole": True} if step is None else {"step": step}))
    assert said["steps"] == list(range(6))
    assert said["step"] == step
    assert said["derived"]["ready"]
    rows = [r for r in rows if step is None or r["step"] == step]
    cells = {(c["domain"], c["effort"]): c for c in said["cells"]}
    assert set(cells) == {(r["domain"], r["effort"]) for r in rows}
    tokens = sum(r["sampled_tokens"] for r in rows if r["fate"] == "trained")
    for (domain, effort), cell in cells.items():
        own = [r for r in rows if (r["domain"], r["effort"]) == (domain, effort)]
        groups = groups_of(own).values()
        same = [g for g in groups if _same([r["reward"] for r in g if r["reward"] is not None])]
        trained = [r for r in own if r["fate"] == "trained"]
        assert cell["rollouts"] == len(own)
        assert cell["groups"] == len(groups)
        assert cell["reward_mean"] == pytest.approx(mean(r["reward"] for r in own))
        assert cell["budget_used"] == pytest.approx(
            mean(r["thinking_tokens"] / r["budget_tokens"] for r in own)
        )
        assert cell["truncated_share"] == pytest.approx(mean(r["status"] == "truncated" for r in own))
        assert cell["zero_variance_groups"] == len(same)
        assert cell["staleness_max"] == max(r["staleness_max"] or 0 for r in own)
        assert cell["tokens_trained"] == sum(r["sampled_tokens"] for r in trained)
        assert cell["tokens_share"] == pytest.approx(cell["tokens_trained"] / tokens)
        assert cell["teacher_kl"] == pytest.approx(_teacher_kl(own), rel=1e-4)
        assert len(selected(client, "one", cell["filter"])) == len(own)


def _same(rewards: list[float]) -> bool:
    return len(rewards) > 1 and max(rewards) - min(rewards) < 1e-9


def _teacher_kl(rows: list[dict]) -> float:
    gaps = [
        a - b
        for r in rows
        if r["teacher_logprobs"]
        for a, b in zip(r["logprobs"], r["teacher_logprobs"], strict=True)
        if a is not None and b is not None
    ]
    return statistics.fmean(gaps)


def test_the_newest_step_is_shown_and_an_unknown_one_named(client):
    assert get(client, "/api/cells", run="one")["step"] == 5
    reply = client.get("/api/cells", params={"run": "one", "step": 77})
    assert reply.status_code == 400
    assert reply.json()["error"] == "'one' holds no rollouts of step 77; the nearest is 5"
    reply = client.get("/api/cells", params={"run": "nine"})
    assert reply.json()["error"] == "there is no run 'nine'; known: one, two"


def test_each_degeneracy_counts_what_its_filter_selects(client, folder):
    rows = rows_of(folder, "one")
    groups = groups_of(rows)
    said = {d["name"]: d for d in get(client, "/api/degeneracies", run="one")["degeneracies"]}
    assert len(said) == 10
    for one in said.values():
        assert one["ready"]
        assert one["sentence"].endswith(".")
        found = selected(client, "one", one["filter"])
        assert len(found) == one["rollouts"]
        assert bool(found) == bool(one["count"])
    same = {k for k, g in groups.items() if _same([r["reward"] for r in g if r["reward"] is not None])}
    assert said["zero_variance"]["count"] == len(same) > 0
    cut = [g for g in groups.values() if all(r["status"] == "truncated" for r in g)]
    assert said["all_truncated"]["count"] == len(cut)
    failed = [r for r in rows if r["reward_outcome"] == "judge_failed"]
    assert said["judge_failed"]["count"] == len(failed) > 0
    loops = selected(client, "one", said["tool_loops"]["filter"])
    assert {r["sample"] for r in loops} == {2}
    assert {r["domain"] for r in loops} == {"agent"}
    outliers = selected(client, "one", said["ratio_outliers"]["filter"])
    assert {(r["draw"], r["sample"]) for r in outliers} == {
        (r["draw"], r["sample"])
        for r in rows
        if any(
            abs(a - b) > 1
            for a, b in zip(r["logprobs"], r["trainer_logprobs"] or [], strict=False)
            if None not in (a, b)
        )
    }
    conflicts = [
        r for r in rows if {(p["value"] > 0) - (p["value"] < 0) for p in r["reward_components"]} >= {1, -1}
    ]
    assert said["conflicting_components"]["count"] == len(conflicts)
    alike = [
        r
        for g in groups.values()
        for r in g
        if r["content"] and [s["content"] for s in g].count(r["content"]) > 1
    ]
    assert said["duplicate_answers"]["count"] == len(alike)
    assert said["silent_problems"]["names"] == sorted(_silent(rows), key=lambda p: p)


def _silent(rows: list[dict]) -> list[str]:
    by_problem = defaultdict(list)
    for group in groups_of(rows).values():
        rewards = [r["reward"] for r in group if r["reward"] is not None]
        by_problem[group[0]["problem_id"]].append(len(rewards) < 2 or _same(rewards))
    return [p for p, silent in by_problem.items() if len(silent) > 1 and all(silent)]


def test_a_number_is_compared_with_another_column(client, folder):
    found = selected(client, "one", "thinking_tokens > budget_tokens or sampled_tokens = thinking_tokens")
    rows = [
        r
        for r in rows_of(folder, "one")
        if r["thinking_tokens"] > r["budget_tokens"] or r["sampled_tokens"] == r["thinking_tokens"]
    ]
    assert len(found) == len(rows) > 0
    assert selected(client, "one", "reward < component.task")
    reply = client.get("/api/rollouts", params={"filter": "reward < domain"})
    assert reply.json()["error"] == "filter: 'reward' is a number, 'domain' is not"


def test_a_group_has_its_samples_side_by_side(client, folder):
    for (step, draw), rows in groups_of(rows_of(folder, "one")).items():
        said = get(client, "/api/group", run="one", step=step, draw=draw)["samples"]
        assert [s["row"]["sample"] for s in said] == [0, 1, 2, 3]
        for sample, row in zip(said, rows, strict=True):
            assert sample["row"]["advantage"] == row["advantage"]
            assert sample["texts"]["content"] == row["content"]
    reply = client.get("/api/group", params={"run": "one", "step": 2, "draw": 999})
    assert reply.json()["error"] == "'one' holds no group 999 in step 2"


def test_one_problem_over_steps_and_runs(client, folder):
    rows = {run: groups_of(rows_of(folder, run)) for run in ("one", "two")}
    said = get(client, "/api/compare", problem_id="sum-002", run=["one", "two"])
    expected = [
        (run, step, draw, [r["reward"] for r in g])
        for run, groups in rows.items()
        for (step, draw), g in sorted(groups.items())
        if g[0]["problem_id"] == "sum-002"
    ]
    assert [(p["run"], p["step"], p["draw"], p["rewards"]) for p in said["points"]] == expected
    assert said["question"] == "What is 5 + 14?"
    reply = client.get("/api/compare", params={"problem_id": "sum-9", "run": "two"})
    assert reply.json()["error"] == "no rollout of 'two' is of the problem 'sum-9'"


def test_problems_always_or_never_solved_and_changed(client, folder):
    rows = [r for r in rows_of(folder, "one") if r["reward"] is not None]
    by_problem = defaultdict(list)
    for row in rows:
        by_problem[row["problem_id"]].append(row)
    said = get(client, "/api/compare/problems", run="one", solved=0.5)
    assert said["total"] == len(by_problem)
    always = {p for p, some in by_problem.items() if all(r["reward"] > 0.5 for r in some)}
    never = {p for p, some in by_problem.items() if not any(r["reward"] > 0.5 for r in some)}
    assert {p["problem_id"] for p in said["always"]["problems"]} == always
    assert {p["problem_id"] for p in said["never"]["problems"]} == never
    for problem in said["changed"]["problems"]:
        draws = groups_of(by_problem[problem["problem_id"]])
        first, *_, last = sorted(draws)
        change = mean(r["reward"] for r in draws[last]) - mean(r["reward"] for r in draws[first])
        assert problem["change"] == pytest.approx(change)
    sizes = [abs(p["change"]) for p in said["changed"]["problems"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes
    between = get(client, "/api/compare/problems", run=["one", "two"])
    two = [r for r in rows_of(folder, "two") if r["reward"] is not None]
    for problem in between["changed"]["problems"]:
        means = [
            mean(
                mean(r["reward"] for r in g)
                for g in groups_of([r for r in some if r["problem_id"] == problem["problem_id"]]).values()
            )
            for some in (rows, two)
        ]
        assert problem["change"] == pytest.approx(means[1] - means[0])


def test_two_rollouts_and_where_they_part(client, folder):
    rows = [r for r in rows_of(folder, "one") if r["step"] == 1]
    by_key = {(r["draw"], r["sample"]): r for r in rows}
    for (draw, sample), b in by_key.items():
        a = by_key[draw, 0]
        names = {"a_run": "one", "a_step": 1, "a_draw": draw, "a_sample": 0}
        said = get(client, "/api/compare/pair", **names, b_run="one", b_step=1, b_draw=draw, b_sample=sample)
        assert said["same_prompt"]
        assert said["same"] == (a["response_text"] == b["response_text"])
        at, token = said["parts_at_character"], said["parts_at_token"]
        if said["same"]:
            assert at is None
            continue
        assert a["response_text"][:at] == b["response_text"][:at]
        assert a["response_text"][at : at + 1] != b["response_text"][at : at + 1]
        assert said["sides"][1]["after"] == b["response_text"][at:]
        if token is not None:
            assert a["response_ids"][:token] == b["response_ids"][:token]
            piece = said["sides"][0]["token"]
            assert piece is None or piece["id"] == a["response_ids"][token]


def test_the_page_in_the_docs_names_every_column_and_its_filters_are_right(client):
    text = (Path(__file__).parents[2] / "docs" / "viewer.md").read_text()
    known = [
        c["name"] for c in get(client, "/api/columns")["columns"] if not c["name"].startswith("component.")
    ]
    assert [name for name in known if name != "run" and f"`{name}`" not in text] == []
    examples = text.split("## Filters")[1].split("```")[1].strip().splitlines()
    assert len(examples) == 4
    for filter in examples:
        get(client, "/api/rollouts", run="one", filter=filter)
    query = text.split("```sql")[1].split("```")[0]
    reply = client.post("/api/sql", json={"query": query}, headers={"X-K3RL": "1"})
    assert reply.status_code == 200, reply.text
    assert reply.json()["rows"]


def test_a_selection_leaves_as_a_data_set_and_in_every_format_alike(client, folder, tmp_path):
    asked = {"run": "one", "filter": "reward is not null and step > 1", "sort": "reward", "descending": True}
    keys = [(r["step"], r["draw"], r["sample"]) for r in selected_in_order(client, asked)]
    replies = {
        f: client.get("/api/export", params={**asked, "format": f})
        for f in ("parquet", "jsonl", "csv", "datasets")
    }
    assert {r.status_code for r in replies.values()} == {200}
    table = pq.read_table(io.BytesIO(replies["parquet"].content))
    stored = {(r["step"], r["draw"], r["sample"]): r for r in rows_of(folder, "one")}
    assert table.to_pylist() == [stored[k] for k in keys]
    lines = [json.loads(line) for line in replies["jsonl"].text.splitlines()]
    assert lines == table.to_pylist()
    cells = list(csv.DictReader(io.StringIO(replies["csv"].text)))
    assert [(int(c["step"]), int(c["draw"]), int(c["sample"])) for c in cells] == keys
    with zipfile.ZipFile(io.BytesIO(replies["datasets"].content)) as packed:
        packed.extractall(tmp_path)
    loaded = load_from_disk(str(tmp_path / "rollouts"))
    assert [(r["step"], r["draw"], r["sample"]) for r in loaded] == keys
    assert loaded[0]["response_ids"] == table["response_ids"][0].as_py()
    nothing = client.get("/api/export", params={"filter": "reward > 99", "format": "parquet"})
    assert pq.read_table(io.BytesIO(nothing.content)).num_rows == 0


def selected_in_order(client, asked: dict) -> list[dict]:
    return get(client, "/api/rollouts", **asked, limit=1000)["rows"]


def test_an_export_leaves_nothing_behind(folder):
    session = Session([folder])
    session.read_all()
    try:
        client = TestClient(make_app(session), base_url="http://localhost")
        client.get("/api/export", params={"format": "jsonl"}).raise_for_status()
        assert not list(session.folder.glob("*.jsonl"))
        file = sorted((folder / "two" / "rollouts").glob("*.parquet"))[0]
        whole = file.read_bytes()
        file.write_bytes(whole[:500])
        try:
            reply = client.get("/api/export", params={"format": "csv"})
        finally:
            file.write_bytes(whole)
        assert reply.status_code == 400
        assert reply.json()["error"].startswith(f"{file.name} cannot be read")
        assert not list(session.folder.glob("*.csv"))
    finally:
        session.__exit__(None, None, None)
