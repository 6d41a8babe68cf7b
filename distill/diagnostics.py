"""What can go wrong between teachers and a student, in numbers: the gate on a teacher's origin, where the two differ
most, and teachers that pull in opposite directions."""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from distill.token_rewards import Opinion, cell_name
from k3rl.chat import Renderer
from k3rl.config.distill import TokenRewardConfig
from k3rl.errors import RunError

log = logging.getLogger(__name__)
CONTEXT_TOKENS = 12


class Gate:
    """A teacher of another origin makes distillation collapse, and its first KL tells: healthy ones are near 0.04 nats
    per token, 0.19 ended at 0.60 of the way (spec/03 §3). Each teacher is looked at the first time it is asked."""

    def __init__(self, config: TokenRewardConfig) -> None:
        self.config = config
        self.seen: set[str] = set()

    def check(self, found: Mapping[str, float]) -> None:
        """Warns; with ``stop_kl``, raises `RunError`."""
        for key, kl in found.items():
            name = key.removeprefix("teacher/kl/teacher/")
            if name == key or name in self.seen:
                continue
            self.seen.add(name)
            said = f"teacher '{name}': the student's reverse KL to it is {kl:.3f} nats per token at the start"
            if self.config.stop_kl is not None and kl > self.config.stop_kl:
                raise RunError(
                    f"{said}, above token_rewards.stop_kl {self.config.stop_kl}: it is of another origin, or reads "
                    "another prompt than it was trained with (teachers.prompt_effort)"
                )
            if kl > self.config.warn_kl:
                log.warning("%s, above %.2f: it may be too far away to learn from", said, self.config.warn_kl)


def largest_gaps(
    opinions: Sequence[Opinion], names: Sequence[str], renderer: Renderer, count: int
) -> list[Any]:
    """The sampled tokens at which teacher and student differ most, largest first, with the text before them."""
    places = ((abs(gap), i, k) for i, o in enumerate(opinions) for k, gap in enumerate(o.gaps))
    found = []
    for _, i, k in heapq.nlargest(count, places):
        opinion = opinions[i]
        t = opinion.trajectory
        at = [n for n, sampled in enumerate(t.sampled_mask) if sampled][k]
        ids = t.token_ids
        found.append(
            {
                "trajectory": t.id, "problem": t.problem_id, "cell": cell_name(t), "teacher": names[opinion.teacher],
                "position": at, "token": ids[at], "text": renderer.decode([ids[at]]),
                "before": renderer.decode(ids[max(0, at - CONTEXT_TOKENS) : at]),
                "student": opinion.student_logprobs[k], "teacher_logprob": opinion.teacher_logprobs[k],
            }
        )  # fmt: skip
    return found


class GapLog:
    """``gaps.jsonl`` of a run: a line per token, each with its step. A resumed run writes its steps again."""

    def __init__(self, path: Path) -> None:
        self.path, self._opened = path, False

    def write(self, step: int, gaps: Sequence[Mapping[str, Any]]) -> None:
        kept = ""
        if not self._opened and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step)
        with open(self.path, "a" if self._opened else "w", encoding="utf-8") as file:
            file.write(
                kept + "".join(json.dumps({"step": step, **gap}, ensure_ascii=False) + "\n" for gap in gaps)
            )
        self._opened = True


def disagreement(
    opinions: Sequence[Opinion], others: Sequence[Mapping[int, list[float]]], names: Sequence[str]
) -> dict[str, float]:
    """Of trajectories that were shown to other teachers as well (``others``: by teacher, its log-probs of the sampled
    tokens): the mean distance of another teacher's log-prob from that of the cell's own, and the share of tokens that
    one of them would have more likely and the other less. Teachers that oppose each other cancel in shared weights."""
    distance: list[float] = []
    opposed: list[bool] = []
    by_other: dict[str, list[float]] = {}
    for opinion, views in zip(opinions, others, strict=True):
        for number, logprobs in views.items():
            rows = zip(opinion.student_logprobs, opinion.teacher_logprobs, logprobs, strict=True)
            for student, own, other in rows:
                distance.append(abs(own - other))
                opposed.append((own - student) * (other - student) < 0)
                by_other.setdefault(names[number], []).append(abs(own - other))
    if not distance:
        return {}
    out = {"teacher/disagreement": fmean(distance), "teacher/opposed_share": fmean(opposed)}
    return out | {f"teacher/disagreement/teacher/{name}": fmean(d) for name, d in by_other.items()}
