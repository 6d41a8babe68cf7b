"""``grm``: a group's rewards from a tournament before an agentic judge. Source: spec/02 §5.

    rewards:
      parts:
        - reward: grm
          arguments:
            judge: {type: endpoint, url: "http://127.0.0.1:8000/v1", model: judge}
            tournament: swiss
            mapping: win_rate

Where too few judgements stand, the group is not scored (`JudgeError`): what becomes of it is ``rewards.on_error``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from k3rl.errors import UserError, nearest
from k3rl.types import Trajectory
from rewards.api import JudgeError, Score, Scored, reward
from rewards.grm.judges import EndpointJudge, Judge, RuleJudge
from rewards.grm.protocol import Criterion, JudgeSession
from rewards.grm.ratings import MAPPINGS, rewards_of
from rewards.grm.tournament import BOTH_OVER, KINDS, Pair, Result, play

LABELS = ("A", "B")
URL_VARIABLE, KEY_VARIABLE = "K3RL_JUDGE_URL_", "K3RL_JUDGE_KEY_"
"""Environment of reward workers: where the run's judge of this name listens, and its token."""
CORE_RUBRIC = (
    Criterion("clarity and relevance", "answers what was asked, in words that its reader needs"),
    Criterion("conversational fluency", "reads as written by a person who listens"),
    Criterion("objectivity", "claims what can be backed, without flattery"),
)
"""K2's core criteria, in our words: what any answer to a person is measured by."""
PRESCRIPTIVE_RUBRIC = (
    Criterion("no opening praise", "does not begin by praising the request or the person"),
    Criterion("no justification of itself", "does not argue that the answer is good"),
)
"""K2's prescriptive criteria: what a policy learns to please judges with, and must not gain by."""
RUBRICS = {"core": CORE_RUBRIC, "prescriptive": PRESCRIPTIVE_RUBRIC}


@dataclass
class Court:
    """One group's tournament: who judges, by what criteria, and what every judgement left behind."""

    judge: Judge
    question: str
    texts: Sequence[str]
    criteria: Sequence[Criterion] = ()
    files: Sequence[Mapping[str, str]] = ()
    traces: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def pair(self, i: int, j: int) -> float | None:
        """Margin of candidate i, who sits first, over j; None where the judgement is void or failed."""
        pair = dict(zip(LABELS, (i, j), strict=True))
        texts = {label: self.texts[k] for label, k in pair.items()}
        files = {label: self.files[k] for label, k in pair.items()} if self.files else {}
        session = JudgeSession(self.question, texts, self.criteria, files)
        try:
            await self.judge(session)
        except JudgeError as error:
            session.finish()
            self.failures.append(str(error))
        trace = {"first": i, "second": j, **session.trace()}
        self.traces.append(trace)
        if session.void:
            return None
        totals = session.totals()
        return totals["A"] - totals["B"]


def check_arguments(
    judge: Mapping[str, Any],
    tournament: str = "swiss",
    mapping: str = "win_rate",
    both_over: str = "tie",
    rubrics: Sequence[str] = (),
    criteria: Sequence[Mapping[str, Any]] = (),
    **_: Any,
) -> None:
    """Before a run starts. Raises `UserError` naming what cannot work."""
    choices = (
        ("tournament", tournament, KINDS), ("mapping", mapping, MAPPINGS), ("both_over", both_over, BOTH_OVER)
    )  # fmt: skip
    for what, given, known in choices:
        if given not in known:
            raise UserError(f"grm.{what}: there is no '{given}'{nearest(given, known)}")
    _criteria(rubrics, criteria)
    if judge.get("type") != "engine":  # which the run has yet to start
        make_judge(judge)


@reward(name="grm", scope="group", depends="trajectory", timeout_s=900.0, check=check_arguments)
async def grm(
    group: list[Scored],
    judge: Mapping[str, Any],
    tournament: str = "swiss",
    mapping: str = "win_rate",
    rounds: int | None = None,
    sigma: float | None = None,
    both_over: str = "tie",
    prior: float = 1.0,
    rubrics: Sequence[str] = (),
    criteria: Sequence[Mapping[str, Any]] = (),
    min_judged: float = 0.5,
    reference_length: float | None = None,
) -> list[Score]:
    """Rewards of a group by a tournament before an agentic judge.

    judge             ``{type: endpoint, url, model, ...}``, ``{type: engine, name}`` of ``rewards.judges``, or
                      ``{type: rule, function: "package.module:function"}``
    tournament        ``all_pairs``, ``swiss`` or ``elimination``; ``rounds``: of Swiss
    mapping           ``win_rate`` (0 to 1), ``rating`` (Bradley-Terry, with ``prior``) or ``rank`` (0 to 1)
    sigma             over sigma x l0 sampled tokens a candidate loses without a call; l0 is the problem's
                      ``reference_length``, or the argument of that name. ``both_over``: what a pair of two such
                      candidates is, ``tie``, won by the ``shorter``, or ``unplayed``
    rubrics           ``core``, ``prescriptive``; ``criteria``: the problem's own, ``{name, description, weight}``
    min_judged        least share of judgements that must stand, else the group is not scored
    """
    court = Court(
        make_judge(judge),
        group[0].question,
        [s.content for s in group],
        _criteria(rubrics, criteria),
        [artifacts_of(s.trajectory) for s in group],
    )
    over = [_over(s.trajectory, s.problem.reference_length or reference_length, sigma) for s in group]
    try:
        result = await play(tournament, len(group), court.pair, rounds, over, both_over)
    finally:
        await court.judge.close()
    health = result.health()
    if result.pairs and 1 - health["void_rate"] < min_judged:
        why = court.failures[-1] if court.failures else "the judge did not keep to its protocol"
        raise JudgeError(f"{health['void_rate']:.0%} of {result.judgements} judgements are void: {why}")
    rewards, ratings = rewards_of(mapping, len(group), result.played, prior)
    return [
        Score(
            float(rewards[i]),
            {
                "rating": float(ratings[i]),
                "over_length": float(over[i] > 0),
                **_shared(result, court, ratings),
            },
            explanation=_words(i, result, ratings),
            trace=json.dumps(_trace_of(i, result, court), ensure_ascii=False),
        )
        for i in range(len(group))
    ]


def artifacts_of(trajectory: Trajectory) -> Mapping[str, str]:
    """Path and content of the files that the trajectory's environment kept for judges, read in a fork of its sandbox
    at the end (`artifacts` of a sandboxed environment)."""
    return (trajectory.environment_state.get("environment") or {}).get("artifacts") or {}


def _words(i: int, result: Result, ratings: Any) -> str:
    if any(i in (a, b) for a, b, _ in result.given) and not any(i in (p.i, p.j) for p in result.pairs):
        return "over the length limit: lost without a judgement"
    won = sum(w if a == i else 1 - w for a, b, w in result.played if i in (a, b))
    games = sum(i in (a, b) for a, b, _ in result.played)
    return f"won {won:g} of {games} pairs; rating {ratings[i]:+.2f} among {result.count}"


def make_judge(spec: Mapping[str, Any]) -> Judge:
    """From the config's mapping. Raises `UserError` naming what is wrong."""
    fields = dict(spec)
    kind = fields.pop("type", None)
    try:
        if kind == "rule":
            from rewards.grm.rules import find_rule

            return RuleJudge(find_rule(fields.pop("function")), **fields)
        if kind == "endpoint":
            return EndpointJudge(**fields)
        if kind == "engine":
            name = fields.pop("name")
            if not (url := os.environ.get(f"{URL_VARIABLE}{name}")):
                raise UserError(f"grm.judge: no run has started the judge '{name}'; see rewards.judges")
            return EndpointJudge(url, name, key_variable=f"{KEY_VARIABLE}{name}", **fields)
    except (TypeError, KeyError) as error:
        raise UserError(f"grm.judge: {error}") from None
    raise UserError(f"grm.judge: no type '{kind}'{nearest(str(kind), ('rule', 'endpoint', 'engine'))}")


def _criteria(rubrics: Sequence[str], own: Sequence[Mapping[str, Any]]) -> list[Criterion]:
    out: list[Criterion] = []
    for name in rubrics:
        if name not in RUBRICS:
            raise UserError(f"grm.rubrics: no rubric '{name}'{nearest(name, RUBRICS)}")
        out += RUBRICS[name]
    for row in own:
        try:
            out.append(Criterion(**row))
        except TypeError as error:
            raise UserError(f"grm.criteria: {error}") from None
    return out


def _over(trajectory: Trajectory, reference: float | None, sigma: float | None) -> float:
    """Tokens beyond the length limit (spec/02 §5), of the sampled tokens of the whole response."""
    if sigma is None:
        return 0.0
    if reference is None:
        raise UserError("grm.sigma needs reference lengths: give the problems 'reference_length'")
    return max(0.0, trajectory.sampled_tokens - sigma * reference)


def _shared(result: Result, court: Court, ratings: Any) -> dict[str, float]:
    """What is the group's, on each of its trajectories: components are what metrics and viewer know."""
    health = {k: v for k, v in result.health().items() if k != "pairs"}
    tokens = sum(t["tokens"] for t in court.traces)
    cost = sum(t["cost"] for t in court.traces)
    return {
        **health,
        "judge_tokens": float(tokens),
        "judge_cost": cost,
        "rating_spread": float(ratings.std()),
    }


def _trace_of(i: int, result: Result, court: Court) -> dict[str, Any]:
    """The judgements that candidate i was part of, and in short: its mean score by criterion, its pairs."""
    mine = [t for t in court.traces if i in (t["first"], t["second"])]
    found: dict[str, list[float]] = {}
    weights: dict[str, float] = {}
    for t in mine:
        for name, value in t["scores"].get(LABELS[i == t["second"]], {}).items():
            found.setdefault(name, []).append(value)
        weights |= {c["name"]: c["weight"] for c in t["rubric"]}
    rubric = [{"name": n, "weight": weights[n], "score": fmean(values)} for n, values in found.items()]
    pairs = [
        {"a": p.i, "b": p.j, "winner": _winner(p, p.first), "swapped": _winner(p, p.second)}
        for p in result.pairs
        if i in (p.i, p.j)
    ]
    guard = [{"a": a, "b": b, "winner": "length limit"} for a, b, _ in result.given if i in (a, b)]
    return {
        "candidate": i, "of": result.count, "rubric": rubric, "pairs": pairs + guard, "judgements": mine,
        "failures": court.failures[-3:],
    }  # fmt: skip


def _winner(pair: Pair, margin: float | None) -> str:
    if margin is None:
        return "void"
    return "tie" if margin == 0 else str(pair.i if margin > 0 else pair.j)
