"""Files that a trajectory made reach the judge: read in a fork, small ones whole, nothing outside the home folder."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from k3rl.types import Problem, Trajectory
from rewards.grm.judges import RuleJudge
from rewards.grm.protocol import JudgeSession
from rewards.grm.reward import Court, artifacts_of
from rollout.environments.artifacts import MAX_BYTES

TASK = {"files": {"brief.txt": "Write about rain."}}


def problem():
    return Problem(
        id="essay",
        domain="agent",
        messages=[{"role": "user", "content": "Write an essay into essay.md."}],
        reward={"name": "none"},
        metadata={"environment": "workspace", "task": TASK},
    )


def test_what_was_made_is_kept_and_links_and_other_folders_are_not(play):
    played = play(problem())
    played.call("bash", command="cat brief.txt; mkdir -p out; printf 'It rains.' > out/essay.md")
    played.call("bash", command="ln -s /etc/passwd out/link.md")
    played.call("bash", command=f"head -c {3 * MAX_BYTES} /dev/zero | tr '\\0' x > big.txt")
    played.call("bash", command="echo secret > /tmp/elsewhere.md; printf '\\377ok' > odd.txt")
    played.answer("Done.")
    kept = played.environment.state()["artifacts"]
    assert set(kept) == {"brief.txt", "out/essay.md", "big.txt", "odd.txt"}
    assert kept["out/essay.md"] == "It rains."
    assert kept["odd.txt"] == "\N{REPLACEMENT CHARACTER}ok"
    assert f"[{2 * MAX_BYTES} bytes left out]" in kept["big.txt"]
    played.elsewhere()
    assert played.environment.state()["artifacts"] == kept


def test_the_trajectorys_own_sandbox_stays_as_it_was(play):
    played = play(problem())
    played.call("bash", command="echo one > a.txt")
    before = played.call("bash", command="find . -type f -printf '%p %T@\\n' | sort")
    played.answer("Done.")
    assert played.call("bash", command="find . -type f -printf '%p %T@\\n' | sort") == before


def test_a_judge_reads_every_file_before_it_may_write_a_rubric():
    """The better file wins, though the texts are equal; files cannot be skipped."""

    def rain(question, answer):
        return {"rain": min(10.0, answer.count("rain"))}

    made = [{"essay.md": "rain " * n} for n in (2, 7, 0)]
    court = Court(RuleJudge(rain), "Write.", ["Done."] * 3, files=made)
    assert asyncio.run(court.pair(0, 1)) == -5
    assert asyncio.run(court.pair(1, 2)) == 7
    session = JudgeSession("Write.", {"A": "x", "B": "y"}, files={"A": {"a.md": "z"}})
    assert "read_file" in [t["function"]["name"] for t in session.tools]
    for label in "AB":
        session.call("read_candidate", {"candidate": label})
    rubric = {"criteria": [{"name": "c", "description": "", "weight": 1}]}
    assert "a.md of A" in session.call("write_rubric", rubric)
    assert "no such file" in session.call("read_file", {"candidate": "B", "path": "a.md"})
    assert '"content": "z"' in session.call("read_file", {"candidate": "A", "path": "a.md"})
    assert session.call("write_rubric", rubric).startswith("rubric of 1")


def test_the_reward_finds_them_in_the_trajectorys_state():
    trajectory = Trajectory("p", 0, 0, "agent", None, [1], [])
    assert artifacts_of(trajectory) == {}
    state = {"environment": {"artifacts": {"a.md": "text"}}}
    assert artifacts_of(replace(trajectory, environment_state=state)) == {"a.md": "text"}
