"""From trajectories and conversations to what a step trains on: one record per sequence, all its tokens'
fields in it.

Suffixes: L tokens of the sequence, n tokens with loss. ``position[i]`` is the index in ``ids`` of the i-th
token with loss; every other per-token field has length n and belongs to the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from k3rl.algorithms.normalisation import Normalisation
from k3rl.types import Trajectory

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SftSequence:
    """A conversation to imitate: ``loss_mask[i]`` says whether token i carries loss, ``weight`` multiplies
    its loss.
    """

    ids: Sequence[int]
    loss_mask: Sequence[bool]
    weight: float = 1.0


SftInput = SftSequence | tuple[Sequence[int], Sequence[bool], float]


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. ``sequence_tokens`` and ``group_tokens`` are counts over the whole batch, all ranks
    included.
    """

    key: str
    ids: Ints
    position: Ints
    group: int = 0
    group_tokens: int = 0
    weight: float = 1.0
    behaviour: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    advantage: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    staleness: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    old: Floats | None = None
    reference: Floats | None = None
    teacher_ids: NDArray[np.int32] | None = None  # [n, K]
    teacher: Floats | None = None  # [n, K]: a teacher's log-probs of these ids
    routing: NDArray[np.int16] | None = None  # [L, expert layers, experts a token], from the engine
    read: int = 0  # the first so many tokens of `routing` are the engine's; see `_routing`

    @property
    def sequence_tokens(self) -> int:
        return len(self.position)

    def __len__(self) -> int:
        return len(self.ids)


def sampled_positions(trajectory: Trajectory) -> Ints:
    """Indices of the sampled tokens in prompt + response. `ValueError` where the first one has nothing
    before it.
    """
    response = np.flatnonzero(np.asarray(trajectory.sampled_mask, dtype=bool))
    position = (response + len(trajectory.prompt_ids)).astype(np.int64)
    if len(position) and position[0] == 0:
        raise ValueError(f"trajectory {trajectory.id}: its first token was sampled with no prompt before it")
    return position


def from_trajectory(trajectory: Trajectory, group: int, version: int) -> Example:
    """One trajectory with its advantage, up to its last sampled token: nothing is predicted from what an environment
    answered after it. `ValueError` where a per-token field has another length than its tokens.
    """
    position = sampled_positions(trajectory)
    n = len(position)
    if trajectory.token_advantages is not None:
        advantage = np.asarray(trajectory.token_advantages, np.float32)
    elif trajectory.advantage is not None:
        advantage = np.full(n, trajectory.advantage, np.float32)
    else:
        raise ValueError(f"trajectory {trajectory.id} has no advantage")
    whole = np.asarray([*trajectory.prompt_ids, *trajectory.token_ids], np.int64)
    ids = whole[: position[-1] + 1] if n else whole
    routing, read = _routing(trajectory, len(ids))
    example = Example(
        key=trajectory.id,
        ids=ids,
        position=position,
        group=group,
        behaviour=np.asarray(trajectory.logprobs, np.float32),
        advantage=advantage,
        staleness=version - np.asarray(trajectory.policy_versions, np.int64),
        routing=routing,
        read=read,
        **_teacher_top(trajectory, n),
    )
    for name in ("behaviour", "advantage", "staleness"):
        if len(getattr(example, name)) != n:
            found = len(getattr(example, name))
            raise ValueError(f"trajectory {trajectory.id}: {found} values of {name} for {n} sampled tokens")
    if n and not np.isfinite(example.behaviour).all():
        raise ValueError(f"trajectory {trajectory.id}: a behaviour log-prob isn't finite")
    if n and not np.isfinite(advantage).all():
        raise ValueError(f"trajectory {trajectory.id}: an advantage isn't finite")
    if n and int(example.staleness.min()) < 0:
        newest = version - int(example.staleness.min())
        raise ValueError(
            f"trajectory {trajectory.id}: version {newest} sampled it, the trainer is at {version}"
        )
    return example


def _teacher_top(trajectory: Trajectory, n: int) -> dict[str, NDArray]:
    if trajectory.teacher_top is None:
        return {}
    ids, logprobs = trajectory.teacher_top
    if len(ids) != n or ids.shape != logprobs.shape:
        raise ValueError(
            f"trajectory {trajectory.id}: a teacher's ids {ids.shape} and log-probs {logprobs.shape} for {n} "
            "sampled tokens"
        )
    return {"teacher_ids": ids, "teacher": logprobs}


def _routing(trajectory: Trajectory, length: int) -> tuple[NDArray[np.int16] | None, int]:
    """The engine's experts for the first ``length`` tokens, and how many of them it read. The newest it may never have
    read; nothing is predicted from it, so it takes the experts of the one before.
    """
    if trajectory.routing is None:
        return None, 0
    routing = np.asarray(trajectory.routing, np.int16)
    if routing.ndim != 3 or len(routing) < max(1, length - 1):
        raise ValueError(f"trajectory {trajectory.id}: routing of shape {routing.shape} for {length} tokens")
    read = min(len(routing), length)
    return np.concatenate([routing[:read], routing[read - 1 : read].repeat(length - read, 0)]), read


def from_trajectories(trajectories: Sequence[Trajectory], version: int) -> list[Example]:
    """Trajectories of one draw are one group. Without sampled tokens a trajectory takes no part."""
    groups: dict[int, int] = {}
    examples = [
        from_trajectory(t, groups.setdefault(t.draw, len(groups)), version)
        for t in trajectories
        if t.sampled_tokens > 0
    ]
    totals = np.zeros(len(groups), np.int64)
    for e in examples:
        totals[e.group] += e.sequence_tokens
    return [replace(e, group_tokens=int(totals[e.group])) for e in examples]


def from_sft(sequences: Sequence[SftInput]) -> list[Example]:
    """Tokens with loss by mask; the first token of a sequence has nothing to be predicted from and never
    counts.
    """
    examples = []
    for index, item in enumerate(sequences):
        s = item if isinstance(item, SftSequence) else SftSequence(*item)
        if len(s.ids) != len(s.loss_mask):
            raise ValueError(f"sequence {index}: {len(s.ids)} ids and {len(s.loss_mask)} mask entries")
        position = np.flatnonzero(np.asarray(s.loss_mask, dtype=bool)).astype(np.int64)
        position = position[position > 0]
        if len(position) == 0 or s.weight == 0:
            continue
        examples.append(
            Example(str(index), np.asarray(s.ids, np.int64), position, index, len(position), s.weight)
        )
    return examples


def denominator(examples: Sequence[Example], normalisation: Normalisation, constant_tokens: int) -> float:
    """What these examples add to the global denominator, from their counts alone (see
    `k3rl.algorithms.normalisation`).
    """
    counted = [e for e in examples if e.sequence_tokens]
    if normalisation == "token":
        return float(sum(e.sequence_tokens for e in counted))
    if normalisation == "group":
        return float(sum(e.sequence_tokens / e.group_tokens for e in counted))
    return float(len(counted)) * (constant_tokens if normalisation == "constant" else 1)
