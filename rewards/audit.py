"""Was the budget rule followed? Recomputed from a run's stored rows alone: what `k3rl budgets check` prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from pydantic import ValidationError

from k3rl.config.rewards import ReplaceOverBudget
from k3rl.errors import UserError
from k3rl.types import Effort, Outcome
from rewards.budgets import tau_of
from rewards.curriculum import Tau, read_events
from rewards.stored import components_of, rollout_files, run_of

COLUMNS = ["step", "draw", "sample", "domain", "effort", "reward", "reward_components", "thinking_tokens",
           "sampled_tokens", "budget_tokens", "fate", "reward_outcome"]  # fmt: skip
STAGE = "evaluated:"


@dataclass(slots=True)
class Cell:
    """The rows of one domain and effort (and, of an evaluation, one model)."""

    lengths: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of b0
    over: int = 0


@dataclass(slots=True)
class Audit:
    """``broken``: rows whose reward is not what the rule makes of them, in words."""

    rows: int = 0
    over: int = 0
    broken: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=lambda: defaultdict(Cell))


def audit(path: Path) -> Audit:
    """All rows of a run, or of the runs of a pipeline, that were scored and have a budget.

    Raises `UserError` where no run has a budget rule that replaces rewards.
    """
    result, rules = Audit(), 0
    for file in rollout_files(path):
        run = run_of(file)
        config = _rule(run) if run is not None else None
        if run is None or config is None:
            continue
        rules += 1
        for row in pq.read_table(file, columns=COLUMNS).to_pylist():
            _check(result, row, config, _tau_at(config, run, row["step"]))
    if not rules:
        raise UserError(f"{path}: no run there has rewards.budgets of type 'replace'")
    return result


def _rule(run: Path) -> ReplaceOverBudget | None:
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    found = (config.get("rewards") or {}).get("budgets") or {}
    if found.get("type") != "replace":
        return None
    try:
        return ReplaceOverBudget.model_validate(found)
    except ValidationError as error:
        raise UserError(
            f"{run}/config.yaml: rewards.budgets is not valid: {error.errors()[0]['msg']}"
        ) from error


def _tau_at(config: ReplaceOverBudget, run: Path, step: int) -> Tau:
    """tau as it was in a step: the config's, and what the trail says was applied until then and not taken back."""
    table: Tau = {domain: dict(values) for domain, values in config.tau.items()}
    if config.curriculum is None:
        return table
    applied: list[dict[str, Any]] = []
    for event in read_events(run):
        if event["event"] == "resumed":
            applied = [e for e in applied if e["step"] < event["step"]]
        elif event["event"] == "applied":
            applied.append(event)
    for event in applied:
        if event["step"] <= step:
            narrowed = {Effort(effort): value for effort, value in event["tau"].items()}
            table.setdefault(event["domain"], {}).update(narrowed)
    return table


def _check(result: Audit, row: Mapping[str, Any], config: ReplaceOverBudget, tau: Tau) -> None:
    factor = tau_of(tau, row["domain"], Effort(row["effort"]) if row["effort"] else None)
    if row["reward_outcome"] != Outcome.SCORED or factor is None or row["budget_tokens"] is None:
        return
    whole = row["domain"] in config.whole_trajectory_domains
    length = row["sampled_tokens"] if whole else row["thinking_tokens"]
    over = length > factor * row["budget_tokens"]
    expected = config.penalty if over else components_of(row).get("task")
    fate = row["fate"] or ""
    stage = fate.removeprefix(STAGE) if fate.startswith(STAGE) else ""
    cell = result.cells[stage, row["domain"], row["effort"]]
    cell.lengths.append(length)
    cell.shares.append(length / row["budget_tokens"])
    cell.over += over
    result.rows += 1
    result.over += over
    if row["reward"] != expected:
        limit = f"tau {factor:g} x b0 {row['budget_tokens']}"
        result.broken.append(
            f"step {row['step']}, trajectory {row['draw']}.{row['sample']}: {length} tokens of {limit}, "
            f"reward {row['reward']:g}, expected {expected}"
        )
