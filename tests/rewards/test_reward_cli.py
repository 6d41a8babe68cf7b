"""`k3rl rewards`: on a stored run, as a person calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from reward_helpers import RENDERER, make_group, make_problem
from typer.testing import CliRunner

from k3rl.cli import app
from k3rl.errors import UserError
from k3rl.store import RunStore, rollout_row
from rewards.stored import read_groups
from rewards.worker import RewardWorker, scored_view

REWARD = '''
from rewards import Scored, reward

@reward(name="short")
def short(scored: Scored, limit: int = 3, penalty: float = 0.0) -> dict[str, float]:
    """Short answers. Longer than ``limit`` characters is bad."""
    if scored.content == "boom":
        raise ValueError("cannot judge this")
    return {"length": float(len(scored.content) <= limit) - penalty, "echo": 0.0}

@reward(scope="group")
def rank(group):
    return [float(i) for i, _ in enumerate(group)]
'''


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps with three problems, stored as the recipe stores it."""
    problems = [
        make_problem(f"p{i}", {"name": "exact", "answer": str(i)}, budget_tokens=8, effort="low")
        for i in range(3)
    ]
    data = tmp_path / "data.jsonl"
    rows = [{"id": p.id, "messages": p.messages, "reward": p.reward, "budget_tokens": 8} for p in problems]
    data.write_text("\n".join(map(json.dumps, rows)))
    config = "kind: rl\nname: stored\nsteps: 2\nmodel: {path: k3-nano}\nrollout: {}\n"
    config += f"data: {{type: jsonl, path: {data}}}\n"
    store = RunStore.create(tmp_path / "stored", config)
    from k3rl.config.rewards import RewardConfig

    worker = RewardWorker(RewardConfig(), RENDERER)
    for step in range(2):
        out = []
        for i, problem in enumerate(problems):
            group = make_group([str(i), "7 or 8", "boom"], problem, think="so " * i)
            group.draw = 3 * step + i
            for trajectory, reward in zip(group.trajectories, worker.score(group), strict=True):
                trajectory.draw, trajectory.reward = group.draw, reward
                for segment in trajectory.segments:
                    segment.policy_version = step
                out.append(
                    rollout_row(
                        trajectory,
                        problem,
                        "trained",
                        step=step,
                        version=step,
                        renderer=RENDERER,
                        thinking=True,
                    )
                )
        store.write_rollouts(step, out)
    worker.close()
    store.close()
    return store.path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(REWARD)
    return path


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["rewards", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_stored_rollouts_read_back_as_what_the_reward_saw(run):
    groups = list(read_groups(run))
    assert [g.step for g in groups] == [0, 0, 0, 1, 1, 1]
    for number, group in enumerate(groups):
        i = number % 3
        assert (group.problem.id, group.problem.reward["answer"]) == (f"p{i}", str(i))
        assert [v.content for v in group.views] == [str(i), "7 or 8", "boom"]
        assert [r.total for r in group.rewards] == [1.0, 0.0, 0.0]
        assert group.rewards[0].components == {"problem": 1.0}
        for view in group.views:
            again = scored_view(view.problem, view.trajectory, RENDERER)
            assert (view.reasoning, view.response.complete) == (again.reasoning, True)
            assert view.trajectory.policy_versions == [number // 3] * view.trajectory.sampled_tokens


def test_a_reward_is_tried_on_a_run(run, file):
    output = call("test", f"{file}:short", "--rollouts", run, "--set", "limit=3")
    assert "12 of 18 trajectories scored" in output
    assert re.search(r"\n\s+1\s+6 █+", output)
    assert re.search(r"\n\s+0\s+6 █+", output)
    assert "mean of length: 0.5000" in output
    assert "0 differ from the stored reward" in output
    assert "6 were not scored" in output
    assert "ValueError: cannot judge this" in output
    assert "slowest" in output
    assert "side by side" in output


def test_disagreements_and_numbers_as_json(run, file):
    numbers = json.loads(call("test", f"{file}:short", "--rollouts", run, "--set", "penalty=0.5", "--json"))
    assert (numbers["trajectories"], numbers["scored"], numbers["disagreements"]) == (18, 12, 12)
    assert numbers["outcomes"] == {"scored": 12, "grader_failed": 6}
    assert numbers["mean"] == pytest.approx(0.0)
    assert numbers["histogram"] == [["-0.5", 6], ["0.5", 6]]
    ranked = json.loads(call("test", f"{file}:rank", "--rollouts", run, "--json"))
    assert ranked["mean"] == 1.0


def test_the_problems_own_rewards_agree_with_what_was_stored(run):
    numbers = json.loads(call("test", "problem", "--rollouts", run, "--json", "--limit", 9))
    assert (numbers["trajectories"], numbers["disagreements"], numbers["mean"]) == (
        9,
        0,
        pytest.approx(1 / 3),
    )


def test_a_bare_parquet_file_needs_its_arguments(run, tmp_path):
    alone = tmp_path / "elsewhere" / "some.parquet"
    alone.parent.mkdir()
    alone.write_bytes((run / "rollouts" / "step-000000.parquet").read_bytes())
    numbers = json.loads(call("test", "exact", "--rollouts", alone, "--set", "answer='2'", "--json"))
    assert numbers["mean"] == pytest.approx(1 / 9)
    with pytest.raises(UserError, match="name a reward"):
        call("test", "problem", "--rollouts", alone)


def test_mistakes_are_one_sentence_that_names_the_place(run, tmp_path, file):
    (tmp_path / "empty").mkdir()
    for arguments, says in [
        (("test", "exakt", "--rollouts", run), "did you mean 'exact'"),
        (("test", f"{file}:shot", "--rollouts", run), "did you mean 'short'"),
        (("test", "exact", "--rollouts", tmp_path / "nowhere"), "there is no run or file"),
        (("test", "exact", "--rollouts", tmp_path / "empty"), "holds no rollouts"),
        (("test", f"{file}:short", "--rollouts", run, "--set", "limt=3"), "did you mean 'limit'"),
        (("test", "exact", "--rollouts", run, "--set", "limit"), "key=value"),
        (("show", "exakt"), "did you mean 'exact'"),
    ]:
        with pytest.raises(UserError, match=re.escape(says)):
            call(*arguments)


def test_rewards_are_listed_and_shown(file):
    listed = call("list", "--module", file)
    assert all(name in listed for name in ("math", "code", "constraints", "short", "rank"))
    shown = call("show", "short", "--module", file)
    assert "Short answers." in shown
    assert re.search(r"limit\s+int\s+3", shown)
    assert str(file) in shown
