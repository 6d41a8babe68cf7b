"""The table of domain x effort: one step, or the whole run, summed up by SQL over the index."""

from __future__ import annotations

from typing import Any

from k3rl.errors import UserError
from k3rl.viewer.filter import word_of
from k3rl.viewer.index import Index

_CELLS = """
    SELECT r.run, r.domain, r.effort,
           count(*) AS rollouts,
           count(DISTINCT (r.step::BIGINT << 40) + r.draw) AS groups,
           avg(r.reward) AS reward_mean,
           avg((r.reward IS NULL)::INT) AS unscored_share,
           avg(r.thinking_tokens) AS thinking_mean,
           avg(r.sampled_tokens) AS sampled_mean,
           avg(r.budget_tokens) AS budget_mean,
           avg(r.thinking_tokens / nullif(r.budget_tokens, 0)) AS budget_used,
           avg((r.thinking_tokens > r.budget_tokens)::INT) AS over_budget_share,
           avg((r.status = 'truncated')::INT) AS truncated_share,
           count(DISTINCT (r.step::BIGINT << 40) + r.draw)
               FILTER (WHERE r.group_reward_std < 1e-9 AND r.group_scored > 1) AS zero_variance_groups,
           sum(r.staleness_mean * r.sampled_tokens) / nullif(sum(r.sampled_tokens)
               FILTER (WHERE r.staleness_mean IS NOT NULL), 0) AS staleness_mean,
           max(r.staleness_max) AS staleness_max,
           count(*) FILTER (WHERE r.fate = 'trained') AS trained,
           coalesce(sum(r.sampled_tokens) FILTER (WHERE r.fate = 'trained'), 0)::BIGINT AS tokens_trained,
           {teacher} AS teacher_kl
    FROM rollouts r {join} WHERE r.run = ? {at} GROUP BY ALL ORDER BY r.domain NULLS LAST, r.effort NULLS LAST
"""
# each rollout's mean, weighted by the tokens that the policy sampled
_TEACHER = """sum(d.teacher_kl * r.sampled_tokens) / nullif(sum(r.sampled_tokens)
    FILTER (WHERE d.teacher_kl IS NOT NULL), 0)"""


def cells(index: Index, run: str, step: int | None = None, whole: bool = False) -> dict[str, Any]:
    """Numbers by domain and effort. ``step`` None: the newest; ``whole``: all steps together.

    Shares are of a cell's rollouts, lengths are tokens, ``budget_used`` is the mean of thinking tokens over the
    budget, ``teacher_kl`` is in nats a token and lags behind while tokens are still being read. ``filter`` selects a
    cell's rollouts. Raises `UserError` where there is no such run or step.
    """
    known_run(index, run)
    cursor = index.cursor()
    steps = [
        s
        for (s,) in cursor.execute(
            "SELECT DISTINCT step FROM rollouts WHERE run = ? ORDER BY 1", [run]
        ).fetchall()
    ]
    if step is not None and step not in steps:
        raise UserError(f"'{run}' holds no rollouts of step {step}{_nearest_steps(steps, step)}")
    chosen = None if whole or not steps else steps[-1] if step is None else step
    has_teacher = cursor.execute("SELECT 1 FROM derived WHERE teacher_kl IS NOT NULL LIMIT 1").fetchone()
    found = cursor.execute(
        _CELLS.format(
            at="" if chosen is None else "AND r.step = ?",
            teacher=_TEACHER if has_teacher else "NULL::DOUBLE",
            join="LEFT JOIN derived d ON d.rid = r.rid" if has_teacher else "",
        ),
        [run] if chosen is None else [run, chosen],
    )
    names = [c[0] for c in found.description]
    rows = [dict(zip(names, values, strict=True)) for values in found.fetchall()]
    tokens = sum(row["tokens_trained"] for row in rows)
    for row in rows:
        row["zero_variance_share"] = row["zero_variance_groups"] / row["groups"]
        row["tokens_share"] = row["tokens_trained"] / tokens if tokens else None
        row["filter"] = _filter(chosen, row)
    return {"run": run, "step": chosen, "steps": steps, "cells": rows, "derived": derived_progress(index)}


def known_run(index: Index, run: str) -> None:
    """Raises `UserError` where there is no such run."""
    if run not in index.runs:
        raise UserError(f"there is no run '{run}'; known: {', '.join(index.runs) or 'none'}")


def derived_progress(index: Index) -> dict[str, Any]:
    """How far the columns that need tokens are: files done, files there, and whether that is all."""
    p = index.progress
    return {"done": p.derived, "total": p.total, "ready": p.done >= p.total and p.derived >= p.total}


def _filter(step: int | None, row: dict[str, Any]) -> str:
    parts = [] if step is None else [f"step = {step}"]
    for name in ("domain", "effort"):
        value = row[name]
        parts.append(f"{name} is null" if value is None else f"{name} = {word_of(value)}")
    return " and ".join(parts)


def _nearest_steps(steps: list[int], step: int) -> str:
    near = sorted(steps, key=lambda s: abs(s - step))[:1]
    return f"; the nearest is {near[0]}" if near else ""
