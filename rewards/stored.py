"""Rollouts of a run, read back from its parquet files as what a reward sees.

The problems' rewards and answers are those of the data that the run's config names.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import yaml

from k3rl.chat import Renderer, load_renderer
from k3rl.data import load_problems
from k3rl.data.config import DataConfig
from k3rl.errors import UserError
from k3rl.types import (
    Author,
    Channel,
    Effort,
    Outcome,
    ParsedResponse,
    Problem,
    Reward,
    Segment,
    Status,
    StopReason,
    Trajectory,
)
from rewards.api import Scored
from rewards.worker import scored_view


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """The stored trajectories of one draw, in the order of their samples, with the rewards they got then."""

    step: int
    problem: Problem
    views: list[Scored]
    rewards: list[Reward]


def rollout_files(path: Path) -> list[Path]:
    """Parquet files of a run's folder, a pipeline's folder, or the file itself. Raises `UserError`."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"there is no run or file '{path}'")
    for pattern in ("rollouts/*.parquet", "*/rollouts/*.parquet", "*.parquet"):
        if files := sorted(path.glob(pattern)):
            return files
    raise UserError(f"{path} holds no rollouts: neither rollouts/*.parquet nor *.parquet")


def read_groups(path: Path, problems: bool = True, limit: int | None = None) -> Iterator[StoredGroup]:
    """Groups of a run or file, newest step last. ``limit`` counts trajectories.

    ``problems``: look up what the data says of each problem: its reward, answer and metadata; without, a problem is
    what its row holds. Raises `UserError` where the rows are not a run's rollouts.
    """
    left = limit if limit is not None else 1 << 62
    for file in rollout_files(path):
        source = _Source.of(file) if problems else None
        rows = _rows(file)
        for _, some in sorted(_by_draw(rows).items()):
            if left <= 0:
                return
            some = some[:left]
            left -= len(some)
            problem = source.problem(some[0]) if source else problem_of(some[0])
            yield _group(some, problem, renderer_of_run(file), _thinks(file))


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        table = pq.read_table(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as parquet: {error}") from error
    lacking = {"problem_id", "draw", "sample", "response_ids", "channels"} - set(table.column_names)
    if lacking:
        raise UserError(f"{file} holds no rollouts of a run: it lacks the columns {sorted(lacking)}")
    return table.to_pylist()


def _by_draw(rows: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["draw"], []).append(row)
    return {draw: sorted(some, key=lambda r: r["sample"]) for draw, some in found.items()}


def _thinks(file: Path) -> bool:
    """Did the run sample a think channel?"""
    run = run_of(file)
    return run is None or bool(_config(run).get("thinking", True))


def _group(
    rows: list[dict[str, Any]], problem: Problem, renderer: Renderer | None, thinking: bool
) -> StoredGroup:
    views, rewards = [], []
    for row in rows:
        trajectory = trajectory_of(row)
        own = replace(problem, effort=trajectory.effort)
        if renderer is not None:
            view = scored_view(own, trajectory, renderer, thinking)
        else:
            view = Scored(own, ParsedResponse(row["reasoning"] or "", row["content"] or ""), trajectory)
        views.append(view)
        rewards.append(stored_reward(row))
    return StoredGroup(rows[0].get("step") or 0, problem, views, rewards)


def trajectory_of(row: dict[str, Any]) -> Trajectory:
    """The trajectory, cut into segments by author, channel and version."""
    columns = [
        row["response_ids"],
        row["sampled_mask"],
        row["channels"],
        row["logprobs"],
        row["policy_versions"],
    ]
    segments: list[Segment] = []
    last: tuple[Any, ...] = ()
    for token, sampled, channel, logprob, version in zip(*columns, strict=True):
        key = (sampled, channel, version)
        if key != last:
            author = Author.MODEL if sampled else Author.ENVIRONMENT
            segments.append(Segment(author, Channel(channel), [], [], -1 if version is None else version))
            last = key
        segments[-1].token_ids.append(token)
        if sampled:
            segments[-1].logprobs.append(logprob)
    return Trajectory(
        problem_id=row["problem_id"],
        draw=row["draw"],
        sample=row["sample"],
        domain=row["domain"],
        effort=Effort(row["effort"]) if row["effort"] else None,
        prompt_ids=row["prompt_ids"],
        segments=segments,
        status=Status(row["status"]),
        stop_reason=StopReason(row["stop_reason"]) if row["stop_reason"] else None,
        error=row["error"] or "",
        turns=row["turns"] or 0,
    )


def components_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The named parts of a row's reward."""
    return {part["name"]: part["value"] for part in row["reward_components"] or ()}


def stored_reward(row: Mapping[str, Any]) -> Reward:
    outcome = Outcome(row["reward_outcome"]) if row["reward_outcome"] else Outcome.SKIPPED
    return Reward(row["reward"], components_of(row), outcome, row["reward_explanation"] or "")


def problem_of(row: dict[str, Any]) -> Problem:
    """What a row alone says of its problem: no reward, no answer."""
    return Problem(
        id=row["problem_id"],
        domain=row["domain"],
        messages=json.loads(row["messages_json"]),
        reward={"name": ""},
        effort=Effort(row["effort"]) if row["effort"] else None,
        budget_tokens=row["budget_tokens"],
        reference_length=row["reference_length"],
    )


def run_of(file: Path) -> Path | None:
    """The run's folder that a rollout file lies in."""
    folder = file.resolve().parent.parent
    return folder if (folder / "config.yaml").is_file() else None


@functools.lru_cache(maxsize=16)
def _config(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))


_renderers: dict[Path, Renderer | None] = {}


def renderer_of_run(file: Path) -> Renderer | None:
    """The tokenizer of the run's model; `None` where it is not to be found: turns are then not parsed again."""
    run = run_of(file)
    if run is None:
        return None
    if run not in _renderers:
        config = _config(run)
        models = [config["model"]] if "model" in config else list(config.get("models", {}).values())
        saved = sorted(run.glob("checkpoints/*/trainer/model"))[-1:]
        _renderers[run] = _first_renderer([m["path"] for m in models] + [str(s) for s in saved])
    return _renderers[run]


def _first_renderer(places: list[str]) -> Renderer | None:
    for place in places:
        try:
            return load_renderer(place)
        except UserError:
            continue  # the next place may have it
    return None


class _Source:
    """The problems of a run's data, by id."""

    _known: ClassVar[dict[Path, _Source]] = {}

    def __init__(self, run: Path) -> None:
        from pydantic import TypeAdapter

        config = _config(run)
        data = config.get("data") or config.get("evaluation", {}).get("data")
        if data is None:
            raise UserError(f"{run}/config.yaml names no problems")
        self.run = run
        self.source = load_problems(TypeAdapter(DataConfig).validate_python(data))
        self.found: dict[str, Problem] = {}
        self.read = 0

    @classmethod
    def of(cls, file: Path) -> _Source:
        run = run_of(file)
        if run is None:
            raise UserError(
                f"{file} lies in no run's folder, so that its problems' answers are not known; give arguments "
                "with --set, such as --set answer=12"
            )
        if run not in cls._known:
            cls._known[run] = cls(run)
        return cls._known[run]

    def problem(self, row: dict[str, Any]) -> Problem:
        """Raises `UserError` where the data does not hold the problem any more."""
        wanted = row["problem_id"]
        while wanted not in self.found and self.read < len(self.source):
            problem = self.source[self.read]
            self.found[problem.id] = problem
            self.read += 1
        if wanted not in self.found:
            raise UserError(f"{self.run}: its data holds no problem '{wanted}' any more")
        return self.found[wanted]
