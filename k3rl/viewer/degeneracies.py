"""Named ways in which a run goes wrong, each with a count, a sentence, and the filter that selects its rollouts.

A degeneracy is counted with its own filter, so that the number and what a click on it shows cannot differ. Those that
compare rollouts with the run as a whole (stale tails, starved domains, silent problems) look the run up first and put
what they found into the filter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import duckdb

from k3rl.viewer.cells import derived_progress, known_run
from k3rl.viewer.filter import compile_filter, word_of
from k3rl.viewer.index import Index
from k3rl.viewer.queries import tables_of

LOOP_CALLS = 4
"""The same tool call this often is a loop."""
OUTLIER_NATS = 1.0
"""A token whose trainer and engine log-probs differ by more: its ratio lies outside 1/e to e."""
STARVED_SHARE = 0.25
"""A domain with less of the tokens that had an advantage than this part of an even share."""
MOST_NAMED = 100
"""Problems that one filter names: it has to fit into an address."""
_UNITS = ("rollouts", "groups", "problems", "domains")
_SAME = "group_reward_std < 1e-9 and group_scored > 1"


@dataclass(frozen=True, slots=True)
class Degeneracy:
    """``unit``: what ``count`` counts. ``names``: the domains or problems meant, where it is about such."""

    name: str
    title: str
    unit: str
    sentence: str
    filter: str
    sort: str = ""
    names: tuple[str, ...] = ()
    more: int = 0


def degeneracies(index: Index, run: str, step: int | None = None) -> dict[str, Any]:
    """All of them with their counts; of one step, or of the run. Raises `UserError` where there is no such run.

    ``ready`` is false for those that need tokens which are still being read: their counts will grow.
    """
    known_run(index, run)
    cursor = index.cursor()
    bound, values = ("r.run = ?", [run]) if step is None else ("r.run = ? AND r.step = ?", [run, step])
    at = "" if step is None else f"step = {step} and "
    whole = _row(
        cursor,
        f"SELECT count(*), count(DISTINCT (r.step::BIGINT << 40) + r.draw), count(DISTINCT r.problem_id), "
        f"count(DISTINCT r.domain) FROM rollouts r WHERE {bound}",
        values,
    )
    totals = dict(zip(_UNITS, whole, strict=True))
    found = []
    for one in [
        *_BY_ROW,
        _stale(cursor, bound, values),
        _starved(cursor, bound, values),
        _silent(cursor, run),
    ]:
        selected = f"{at}({one.filter})" if " or " in one.filter else f"{at}{one.filter}"
        counted, needs = _count(index, cursor, selected, run)
        count = len(one.names) + one.more if one.names else counted[one.unit] if counted["rollouts"] else 0
        found.append(
            {
                "name": one.name,
                "title": one.title,
                "unit": one.unit,
                "count": count,
                "of": totals.get(one.unit),
                "rollouts": counted["rollouts"],
                "sentence": one.sentence,
                "names": list(one.names),
                "filter": selected,
                "partial": one.more > 0,
                "sort": one.sort.removeprefix("-"),
                "descending": one.sort.startswith("-"),
                "ready": "derived" not in needs or derived_progress(index)["ready"],
            }
        )
    return {
        "run": run,
        "step": step,
        "totals": totals,
        "degeneracies": found,
        "derived": derived_progress(index),
    }


_BY_ROW = [
    Degeneracy(
        "zero_variance",
        "Zero-variance groups",
        "groups",
        "All samples of the group have the same reward, so that no advantage and no gradient comes of it.",
        _SAME,
    ),
    Degeneracy(
        "all_truncated",
        "All truncated",
        "groups",
        "A limit ended every sample of the group: nothing finished was ever compared.",
        "group_truncated = group_size and group_size > 0",
        "-sampled_tokens",
    ),
    Degeneracy(
        "judge_failed",
        "Judge or grader failed",
        "rollouts",
        "The judge or grader gave no verdict: these rollouts have no reward through no fault of theirs.",
        "reward_outcome in (judge_failed, grader_failed, timed_out)",
    ),
    Degeneracy(
        "tool_loops",
        "Tool loops",
        "rollouts",
        f"One and the same tool call was made {LOOP_CALLS} times or more.",
        f"repeated_calls >= {LOOP_CALLS}",
        "-repeated_calls",
    ),
    Degeneracy(
        "ratio_outliers",
        "Ratio outliers",
        "rollouts",
        f"At some token trainer and engine differ by more than {OUTLIER_NATS:g} nat: what is trained on is not what "
        "was sampled.",
        f"logprob_gap_max > {OUTLIER_NATS:g}",
        "-logprob_gap_max",
    ),
    Degeneracy(
        "duplicate_answers",
        "Duplicate answers",
        "rollouts",
        "Another sample of the same group gave the very same answer, letter by letter.",
        "duplicates > 0",
        "-duplicates",
    ),
    Degeneracy(
        "conflicting_components",
        "Conflicting reward components",
        "rollouts",
        "Some parts of the reward are positive and some negative: they pull against each other.",
        "component_conflict = true",
    ),
]


def _stale(cursor: duckdb.DuckDBPyConnection, bound: str, values: list[Any]) -> Degeneracy:
    """The tail of the run's own distribution: three deviations above its mean, and two versions at least."""
    mean, spread = _row(
        cursor,
        f"SELECT avg(r.staleness_max), stddev_pop(r.staleness_max) FROM rollouts r WHERE {bound}",
        values,
    )
    least = max(2, math.ceil((mean or 0) + 3 * (spread or 0)))
    return Degeneracy(
        "stale_tails",
        "Stale tails",
        "rollouts",
        f"Some tokens are {least} policy versions old or older, far above what is usual in this run.",
        f"staleness_max >= {least}",
        "-staleness_max",
    )


def _starved(cursor: duckdb.DuckDBPyConnection, bound: str, values: list[Any]) -> Degeneracy:
    """Tokens count where they moved the policy: trained, with an advantage."""
    found = cursor.execute(
        f"SELECT r.domain, coalesce(sum(r.sampled_tokens) FILTER (WHERE r.fate = 'trained' AND r.advantage != 0), 0) "
        f"FROM rollouts r WHERE {bound} AND r.domain IS NOT NULL GROUP BY 1",
        values,
    ).fetchall()
    total = sum(tokens for _, tokens in found)
    known = _row(cursor, f"SELECT count(r.advantage) FROM rollouts r WHERE {bound}", values)[0]
    starved = sorted(d for d, n in found if known and (not n or n * len(found) < STARVED_SHARE * total))
    return Degeneracy(
        "starved_domains",
        "Starved domains",
        "domains",
        f"The domain has less than {STARVED_SHARE:.0%} of an even share of the tokens that were trained on with an "
        "advantage.",
        _any_of("domain", starved),
        "",
        tuple(starved),
    )


def _silent(cursor: duckdb.DuckDBPyConnection, run: str) -> Degeneracy:
    """Over the whole run, whatever step is looked at: signal may come later."""
    found = [
        p
        for (p,) in cursor.execute(
            "SELECT problem_id FROM rollouts WHERE run = ? AND problem_id IS NOT NULL GROUP BY 1 "
            "HAVING count(DISTINCT (step, draw)) > 1 AND bool_and(group_scored < 2 OR group_reward_std < 1e-9) "
            "AND max(group_size) > 1 ORDER BY count(*) DESC, problem_id",
            [run],
        ).fetchall()
    ]
    return Degeneracy(
        "silent_problems",
        "Problems that never give signal",
        "problems",
        "The problem was drawn more than once, and every time all its samples had the same reward or none.",
        _any_of("problem_id", found[:MOST_NAMED]),
        "problem_id",
        tuple(found[:MOST_NAMED]),
        max(0, len(found) - MOST_NAMED),
    )


def _any_of(column: str, values: list[str]) -> str:
    """A filter for these values; for none of them, one that selects nothing."""
    return (
        f"{column} in ({', '.join(map(word_of, values))})" if values else f"{column} is null and run is null"
    )


def _count(
    index: Index, cursor: duckdb.DuckDBPyConnection, filter: str, run: str
) -> tuple[dict[str, int], set[str]]:
    compiled = compile_filter(filter, index.columns, lambda _: 0)
    row = _row(
        cursor,
        "SELECT count(*), count(DISTINCT (r.step::BIGINT << 40) + r.draw), count(DISTINCT r.problem_id), "
        "count(DISTINCT r.domain) "
        f"FROM {tables_of(compiled.needs)} WHERE r.run = ? AND {compiled.sql}",
        [run, *compiled.parameters],
    )
    return dict(zip(_UNITS, row, strict=True)), compiled.needs


def _row(cursor: duckdb.DuckDBPyConnection, sql: str, values: list[Any]) -> tuple[Any, ...]:
    return cursor.execute(sql, values).fetchone() or ()
