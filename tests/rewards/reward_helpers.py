"""Problems and trajectories for reward tests, made through the real renderer."""

from __future__ import annotations

from pathlib import Path

from k3rl.chat import load_renderer
from k3rl.types import Author, Channel, Effort, Group, Problem, Segment, Status, Trajectory

RENDERER = load_renderer("k3-nano")


def segments(ids: list[int], version: int = 0) -> list[Segment]:
    """A sampled turn, cut by channel as the rollout does."""
    channels = RENDERER.parse(ids).channels
    cut: list[Segment] = []
    for token, channel in zip(ids, channels, strict=True):
        if not cut or cut[-1].channel is not channel:
            cut.append(Segment(Author.MODEL, channel, [], [], version))
        cut[-1].token_ids.append(token)
        cut[-1].logprobs.append(-0.5)
    return cut


def make_trajectory(
    problem: Problem, sample: int, content: str, think: str = "1", effort: Effort | None = None
) -> Trajectory:
    prompt = RENDERER.encode_prompt(problem.messages, problem.tools)
    reply = {"role": "assistant", "content": content, "reasoning_content": think}
    whole = RENDERER.encode_conversation([*problem.messages, reply], problem.tools).ids
    assert whole[: len(prompt)] == prompt
    trajectory = Trajectory(problem.id, 0, sample, problem.domain, effort or problem.effort, prompt)
    trajectory.segments = segments(whole[len(prompt) :])
    trajectory.status = Status.COMPLETE
    return trajectory


def make_problem(name: str = "p", reward: dict | None = None, domain: str = "general", **more) -> Problem:
    return Problem(
        name,
        domain,
        [{"role": "user", "content": "3+5="}],
        reward or {"name": "exact", "answer": "8"},
        **more,
    )


def make_group(contents: list[str], problem: Problem | None = None, **more) -> Group:
    problem = problem or make_problem()
    return Group(problem, 0, [make_trajectory(problem, i, c, **more) for i, c in enumerate(contents)])


def descendants(root: int) -> dict[int, str]:
    """Process ids below ``root`` and what they run."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = (int(text.rpartition(")")[2].split()[1]), command)
    found: dict[int, str] = {}
    grew = True
    while grew:
        new = {
            p: c
            for p, (parent, c) in parents.items()
            if (parent == root or parent in found) and p not in found
        }
        found |= new
        grew = bool(new)
    return found


__all__ = ["RENDERER", "Channel", "descendants", "make_group", "make_problem", "make_trajectory", "segments"]
