"""tau over a run: which step of the curriculum each domain is at, who let it go there, and when.

The trail is a file of events, ``curriculum.jsonl``, that the run and `k3rl curriculum` append to. Everything known is
read back from it, so that a run that resumes is where it was, and an approval given while no run is alive counts.

    proposed   the run: the next step is due
    approved   a person, or the config (``auto``)
    rejected   a person: the proposal is void, the next comes after ``hold_steps``
    applied    the run: tau is narrower from this step of the run on
    observed   the run: sum and count of a step's task rewards, where the next step of the curriculum needs a mean
    resumed    the run went back to a checkpoint: what it noted after that is void
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3rl.config.rewards import ReplaceOverBudget, TauCurriculum
from k3rl.errors import UserError, nearest
from k3rl.types import Effort

FILE = "curriculum.jsonl"
PEOPLE = ("approved", "rejected")  # a decision stands, wherever the run goes on from
Tau = dict[str, dict[Effort, float]]


@dataclass(slots=True)
class DomainState:
    """Where a domain is. ``since`` is the step of the run at which its stage, or its last refusal, began."""

    stage: int = 0
    since: int = 0
    proposed: bool = False
    approved: bool = False
    rewards: dict[int, tuple[float, int]] = field(default_factory=dict)  # by step: sum and count


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events; a last line that a kill cut short is none. Raises `UserError` for a file that is something else."""
    file = path / FILE
    if not file.exists():
        return []
    events = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            event = json.loads(line)
            event["event"], event["step"] = str(event["event"]), int(event["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file}, line {number}: not an event of a curriculum ({error})") from error
        events.append(event)
    return events


def append_event(path: Path, event: str, step: int, **more: Any) -> dict[str, Any]:
    """One line, whole, at the end, whoever else writes; on disk when this returns."""
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "event": event,
        "step": step,
        **more,
    }
    with open(path / FILE, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):  # what a kill cut short
            file.truncate(content.rfind(b"\n") + 1)
        file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    return record


def replay(config: TauCurriculum, events: list[dict[str, Any]]) -> dict[str, DomainState]:
    """The state that a trail of events leads to."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "resumed":
            kept = [e for e in kept if e["event"] in PEOPLE or e["step"] < event["step"]]
        kept.append(event)
    states = {domain: DomainState() for domain in config.stages}
    for event in kept:
        state = states.get(event.get("domain", ""))
        if state is None:
            continue
        match event["event"]:
            case "proposed":
                state.proposed = True
            case "observed":
                state.rewards[event["step"]] = (event["sum"], event["count"])
            case "approved" if event.get("stage") == state.stage + 1:
                state.approved = True
            case "rejected":
                state.proposed, state.approved, state.since = False, False, event["step"]
            case "applied":
                state.stage, state.since = event["stage"], event["step"]
                state.proposed = state.approved = False
    return states


class Curriculum:
    """The run's side. One writer: the run; `approve` and `reject` are for other processes."""

    def __init__(self, config: ReplaceOverBudget, path: Path, first_step: int = 0) -> None:
        assert config.curriculum is not None
        self.budgets, self.config, self.path = config, config.curriculum, path
        events = read_events(path)
        if any(e["event"] not in PEOPLE and e["step"] >= first_step for e in events):
            events.append(append_event(path, "resumed", first_step))
        self.states = replay(self.config, events)

    def begin_step(self, step: int) -> Tau:
        """tau by domain and effort for this step; takes up approvals that have come since the last."""
        fresh = replay(self.config, read_events(self.path))
        for domain, state in fresh.items():
            if state.approved and state.proposed:
                stage = state.stage + 1
                append_event(
                    self.path, "applied", step, domain=domain, stage=stage, tau=self._stage(domain, stage)
                )
                state.stage, state.since, state.proposed, state.approved = stage, step, False, False
        self.states = fresh
        return self.tau()

    def end_step(self, step: int, rewards: Mapping[str, list[float]]) -> None:
        """``rewards``: the step's task rewards by domain, before the budget rule. Proposes what is due."""
        for domain, state in self.states.items():
            if state.stage >= len(self.config.stages[domain]):
                continue
            if self.config.min_reward is not None and rewards.get(domain):
                seen = (sum(rewards[domain]), len(rewards[domain]))
                append_event(self.path, "observed", step, domain=domain, sum=seen[0], count=seen[1])
                state.rewards[step] = seen
            if not state.proposed and step + 1 - state.since >= self.config.hold_steps:
                self._propose(step, domain, state)

    def _propose(self, step: int, domain: str, state: DomainState) -> None:
        mean = self.mean_reward(state, step)
        if self.config.min_reward is not None and not (mean is not None and mean >= self.config.min_reward):
            return
        stage = state.stage + 1
        more = {"domain": domain, "stage": stage, "tau": self._stage(domain, stage), "mean_reward": mean}
        append_event(self.path, "proposed", step, **more)
        state.proposed = True
        if self.config.approval == "auto":
            append_event(
                self.path, "approved", step, domain=domain, stage=stage, by="config: approval is auto"
            )

    def mean_reward(self, state: DomainState, step: int) -> float | None:
        """Over the last ``hold_steps`` steps."""
        window = [seen for at, seen in state.rewards.items() if step - self.config.hold_steps < at <= step]
        count = sum(n for _, n in window)
        return sum(total for total, _ in window) / count if count else None

    def _stage(self, domain: str, stage: int) -> dict[str, float]:
        return {str(e): v for e, v in self.config.stages[domain][stage - 1].items()}

    def tau(self) -> Tau:
        return tau_at(self.budgets, self.states)

    def metrics(self) -> dict[str, float]:
        """``curriculum/stage/<domain>`` and ``curriculum/waiting`` (proposals that wait for a person)."""
        stages = {f"curriculum/stage/{d}": float(s.stage) for d, s in self.states.items()}
        return {
            **stages,
            "curriculum/waiting": float(sum(s.proposed and not s.approved for s in self.states.values())),
        }


def tau_at(budgets: ReplaceOverBudget, states: Mapping[str, DomainState]) -> Tau:
    """The config's tau with each domain's stages put over it."""
    assert budgets.curriculum is not None
    table = {domain: dict(values) for domain, values in budgets.tau.items()}
    for domain, state in states.items():
        for stage in budgets.curriculum.stages[domain][: state.stage]:
            table.setdefault(domain, {}).update(stage)
    return table


def waiting(config: TauCurriculum, path: Path) -> dict[str, int]:
    """Domains with a step that waits for approval, and which stage that leads to."""
    states = replay(config, read_events(path))
    return {d: s.stage + 1 for d, s in states.items() if s.proposed and not s.approved}


def decide(
    config: TauCurriculum, path: Path, verdict: str, by: str, domain: str | None = None, note: str = ""
) -> list[dict[str, Any]]:
    """A person's decision (``approved`` or ``rejected``) on what waits, in one domain or all. Raises `UserError`
    where nothing waits."""
    events = read_events(path)
    found = waiting(config, path)
    if domain is not None and domain not in config.stages:
        raise UserError(f"{path}: its curriculum has no domain '{domain}'{nearest(domain, config.stages)}")
    if domain is not None:
        found = {d: stage for d, stage in found.items() if d == domain}
    if not found:
        states = replay(config, events)
        where = ", ".join(f"{d} at stage {s.stage} of {len(config.stages[d])}" for d, s in states.items())
        raise UserError(f"{path}: no step of its curriculum waits for a decision ({where})")
    step = max((e["step"] for e in events), default=0)
    return [
        append_event(path, verdict, step, domain=d, stage=stage, by=by, **({"note": note} if note else {}))
        for d, stage in found.items()
    ]
