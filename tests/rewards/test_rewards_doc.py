"""docs/rewards.md does what it says: its files are the example's, its commands run word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from k3rl.config.load import load_job
from k3rl.config.rewards import RewardConfig
from rewards.registry import BUILT_IN, get_reward

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "custom_reward"
FIVE_MINUTES_S = 300


def blocks(language: str, text: str = DOC) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_file_and_the_config_are_those_of_the_example():
    assert blocks("python")[0] == (EXAMPLE / "letters.py").read_text()
    shown = yaml.safe_load(blocks("yaml")[0])
    used = yaml.safe_load((EXAMPLE / "letters.yaml").read_text())
    assert shown["rewards"] == used["rewards"]


def test_every_config_that_is_shown_is_valid():
    for text in blocks("yaml"):
        TypeAdapter(RewardConfig).validate_python(yaml.safe_load(text)["rewards"])
    for name in ("config.yaml", "letters.yaml"):
        load_job(EXAMPLE / name)


def test_every_built_in_reward_is_in_the_table():
    table = DOC.partition("## The ones that are there")[2].partition("## Rewards on other machines")[0]
    assert set(BUILT_IN) <= set(re.findall(r"`(\w+)`", table))


def test_the_examples_reward_gives_credit_for_letters(monkeypatch):
    monkeypatch.chdir(ROOT)
    from rewards.api import as_score

    class Said:
        def __init__(self, content: str) -> None:
            self.content = content

    letters = get_reward("examples/custom_reward/letters.py:letters").function
    for content, value in [("KX", 1.0), ("KE", 0.5), ("EX", 0.5), ("", 0.0), ("KXX", 0.9), ("XK", 0.0)]:
        assert as_score(letters(Said(content), "KX")).value == pytest.approx(value)


@pytest.mark.slow
def test_the_walk_through_runs_word_for_word_in_five_minutes(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    said = []
    for command in blocks("bash"):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    print(f"{time.monotonic() - began:.0f} s")
    assert "trajectories scored" in said[1]
    assert re.search(r"mean of right: 0\.\d*[1-9]", said[1])
    assert "step 3/3" in said[2]
    assert "trajectories scored" in said[3]
    assert time.monotonic() - began < FIVE_MINUTES_S
