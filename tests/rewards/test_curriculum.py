"""tau over a run: proposals, people's decisions, the audit trail, resumption."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3rl.cli import app
from k3rl.config.rewards import ReplaceOverBudget, TauCurriculum
from k3rl.errors import UserError
from k3rl.types import Effort
from rewards.curriculum import FILE, Curriculum, decide, read_events, waiting

LOW, HIGH, MAX = Effort.LOW, Effort.HIGH, Effort.MAX
WIDE = {"general": {LOW: 4.0, HIGH: 4.0, MAX: 4.0}, "default": {LOW: 9.0}}
STAGES = {"general": ({HIGH: 2.0, LOW: 2.0}, {LOW: 1.0})}


def budgets(**options) -> ReplaceOverBudget:
    return ReplaceOverBudget(tau=WIDE, curriculum=TauCurriculum(stages=STAGES, hold_steps=3, **options))


def events(path: Path) -> list[tuple[str, int]]:
    return [(e["event"], e["step"]) for e in read_events(path)]


def go(curriculum: Curriculum, steps: range, reward: float = 1.0) -> list[float]:
    """Run steps; tau of general/low in each."""
    seen = []
    for step in steps:
        seen.append(curriculum.begin_step(step)["general"][LOW])
        curriculum.end_step(step, {"general": [reward, reward]})
    return seen


def test_by_itself_it_takes_each_step_after_its_time(tmp_path):
    curriculum = Curriculum(budgets(approval="auto"), tmp_path)
    assert go(curriculum, range(9)) == [4.0] * 3 + [2.0] * 3 + [1.0] * 3
    assert curriculum.tau() == {"general": {LOW: 1.0, HIGH: 2.0, MAX: 4.0}, "default": {LOW: 9.0}}
    approvals = [e for e in read_events(tmp_path) if e["event"] == "approved"]
    assert [e["by"] for e in approvals] == ["config: approval is auto"] * 2


def test_without_a_persons_word_nothing_moves(tmp_path):
    curriculum = Curriculum(budgets(), tmp_path)
    assert go(curriculum, range(20)) == [4.0] * 20
    assert events(tmp_path) == [("proposed", 2)]
    assert waiting(budgets().curriculum, tmp_path) == {"general": 1}
    assert curriculum.metrics() == {"curriculum/stage/general": 0.0, "curriculum/waiting": 1.0}
    decide(budgets().curriculum, tmp_path, "approved", "ada", note="accuracy holds")
    assert go(curriculum, range(20, 22)) == [2.0, 2.0]
    trail = read_events(tmp_path)
    assert [e["event"] for e in trail] == ["proposed", "approved", "applied"]
    assert (trail[1]["by"], trail[1]["note"], trail[1]["stage"]) == ("ada", "accuracy holds", 1)
    assert (trail[2]["step"], trail[2]["tau"]) == (20, {"high": 2.0, "low": 2.0})
    assert all(e["time"].endswith("Z") for e in trail)


def test_a_refusal_is_proposed_again_after_the_hold(tmp_path):
    curriculum = Curriculum(budgets(), tmp_path)
    go(curriculum, range(3))
    decide(budgets().curriculum, tmp_path, "rejected", "ada")
    with pytest.raises(UserError, match="waits for a decision"):
        decide(budgets().curriculum, tmp_path, "approved", "ada")
    assert go(curriculum, range(3, 10)) == [4.0] * 7
    assert events(tmp_path) == [("proposed", 2), ("rejected", 2), ("proposed", 4)]


def test_a_weak_policy_is_not_narrowed(tmp_path):
    curriculum = Curriculum(budgets(approval="auto", min_reward=0.8), tmp_path)
    assert go(curriculum, range(10), reward=0.5) == [4.0] * 10
    assert go(curriculum, range(10, 14), reward=0.9) == [4.0, 4.0, 4.0, 2.0]


@pytest.mark.parametrize("seed", range(30))
def test_a_run_that_is_killed_and_resumed_narrows_as_one_that_is_not(tmp_path, seed):
    """The reference never stops. The other is killed at random and goes on from a checkpoint before that."""
    print("seed", seed)
    rng = random.Random(seed)
    config = budgets(approval="auto", min_reward=0.5)
    rewards = [rng.random() for _ in range(30)]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    reference = Curriculum(config, whole)
    expected = []
    for step in range(30):
        expected.append(reference.begin_step(step))
        reference.end_step(step, {"general": [rewards[step]]})
    done, seen = 0, {}
    while done < 30:
        curriculum = Curriculum(config, broken, done)
        stop = rng.randint(done, 30)
        for step in range(done, stop):
            seen[step] = curriculum.begin_step(step)
            if step == stop - 1 and rng.random() < 0.5:
                break  # killed within the step
            curriculum.end_step(step, {"general": [rewards[step]]})
        else:
            if rng.random() < 0.7:
                done = stop
                continue
        done = rng.randint(done, max(done, stop - 1))
    assert [seen[s] for s in range(30)] == expected


def test_an_approval_outlives_the_run_that_proposed_it(tmp_path):
    go(Curriculum(budgets(), tmp_path), range(3))
    decide(budgets().curriculum, tmp_path, "approved", "ada")
    assert go(Curriculum(budgets(), tmp_path, 3), range(3, 5)) == [2.0, 2.0]


def test_a_line_cut_short_is_none_and_foreign_content_is_refused(tmp_path):
    go(Curriculum(budgets(), tmp_path), range(3))
    with open(tmp_path / FILE, "a") as file:
        file.write('{"event": "approved", "st')
    assert events(tmp_path) == [("proposed", 2)]
    decide(budgets().curriculum, tmp_path, "approved", "ada")
    assert events(tmp_path) == [("proposed", 2), ("approved", 2)]
    (tmp_path / FILE).write_text("hello\n")
    with pytest.raises(UserError, match="line 1"):
        read_events(tmp_path)


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["curriculum", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_person_decides_on_the_command_line(tmp_path):
    stored = {"kind": "rl", "rewards": {"budgets": budgets().model_dump(mode="json")}}
    (tmp_path / "config.yaml").write_text(json.dumps(stored))
    curriculum = Curriculum(budgets(), tmp_path)
    with pytest.raises(UserError, match="no step of its curriculum waits"):
        call("approve", tmp_path)
    go(curriculum, range(3))
    assert "waits for approval" in call("show", tmp_path)
    with pytest.raises(UserError, match="did you mean 'general'"):
        call("approve", tmp_path, "--domain", "genral")
    said = call("approve", tmp_path, "--by", "ada", "--note", "looks fine")
    assert said == "general: stage 1 approved by ada\n"
    assert go(curriculum, range(3, 4)) == [2.0]
    shown = call("show", tmp_path)
    assert "1 of 2" in shown
    assert "note looks fine" in shown
    with pytest.raises(UserError, match=r"no config\.yaml"):
        call("show", tmp_path / "nowhere")
