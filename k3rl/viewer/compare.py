"""The same problem set side by side: over all steps, between runs, and two rollouts to where they part."""

from __future__ import annotations

from typing import Any

from k3rl.errors import UserError
from k3rl.viewer.cells import known_run
from k3rl.viewer.index import Index
from k3rl.viewer.queries import Key, Queries, Row
from k3rl.viewer.rollout import Pieces, loaded, question_of, read_row, tokenizer

LONGEST_TEXT = 20_000
_MOST_PROBLEMS = 1000
_AROUND = 400


def problem_over_time(index: Index, runs: list[str], problem: str) -> Row:
    """A problem's rewards at each draw, by run and step. Raises `UserError` where no run holds it."""
    for run in runs:
        known_run(index, run)
    found = index.cursor().execute(
        """
        SELECT run, step, draw, count(*) AS rollouts, avg(reward) AS reward_mean, min(reward) AS reward_min,
               max(reward) AS reward_max, list(reward ORDER BY sample) AS rewards, min(rid) AS rid,
               avg(sampled_tokens) AS sampled_mean, avg((status = 'truncated')::INT) AS truncated_share
        FROM rollouts WHERE problem_id = ? AND list_contains(?, run) GROUP BY run, step, draw ORDER BY run, step, draw
        """,
        [problem, runs or list(index.runs)],
    )
    names = [c[0] for c in found.description]
    points = [dict(zip(names, values, strict=True)) for values in found.fetchall()]
    if not points:
        raise UserError(f"no rollout of {_named(runs)} is of the problem '{problem}'")
    first = _values(index, points[0]["rid"], ("messages_json",))
    for point in points:
        del point["rid"]
    return {
        "problem_id": problem,
        "question": question_of(loaded(first.get("messages_json"))),
        "points": points,
    }


def problems(
    index: Index,
    runs: list[str],
    solved: float = 0.5,
    first: int | None = None,
    last: int | None = None,
    most: int = 100,
) -> Row:
    """Problems always or never solved, and those that changed most.

    A rollout is solved where its reward is above ``solved``. One run: change is the mean reward of a problem's last
    draw minus that of its first, within steps ``first`` to ``last``. Two runs: the second's mean minus the first's.
    ``most``: how many of each kind are listed; the counts are of all. Raises `UserError`.
    """
    if not 1 <= len(runs) <= 2:
        raise UserError("problems are compared within one run or between two: give run= once or twice")
    for run in runs:
        known_run(index, run)
    between = len(runs) == 2
    found = index.cursor().execute(
        f"""
        WITH scored AS (
            SELECT * FROM rollouts WHERE list_contains(?, run) AND problem_id IS NOT NULL AND reward IS NOT NULL
                AND step >= coalesce(?, step) AND step <= coalesce(?, step)
        ), draws AS (
            SELECT problem_id, run, step, draw, avg(reward) AS mean FROM scored GROUP BY ALL
        ), ends AS (
            SELECT problem_id, {_BETWEEN if between else _WITHIN} FROM draws GROUP BY problem_id
        )
        SELECT s.problem_id, min(s.domain) AS domain, count(*) AS rollouts,
               count(DISTINCT (s.run, s.step, s.draw)) AS draws,
               avg(s.reward) AS reward_mean, avg((s.reward > ?)::INT) AS solved_share,
               e.first_mean, e.last_mean, e.last_mean - e.first_mean AS change
        FROM scored s JOIN ends e USING (problem_id) GROUP BY s.problem_id, e.first_mean, e.last_mean
        ORDER BY abs(coalesce(e.last_mean - e.first_mean, 0)) DESC, s.problem_id
        """,
        [runs, first, last, *((runs[0], runs[1]) if between else ()), solved],
    )
    names = [c[0] for c in found.description]
    rows = [dict(zip(names, values, strict=True)) for values in found.fetchall()]
    most = max(1, min(most, _MOST_PROBLEMS))
    kinds = {
        "always": [r for r in rows if r["solved_share"] == 1],
        "never": [r for r in rows if r["solved_share"] == 0],
        "changed": [r for r in rows if r["change"]],
    }
    return {
        "runs": runs,
        "solved": solved,
        "total": len(rows),
        **{kind: {"count": len(some), "problems": some[:most]} for kind, some in kinds.items()},
    }


_WITHIN = """CASE WHEN count(*) > 1 THEN arg_min(mean, (step, draw)) END AS first_mean,
             CASE WHEN count(*) > 1 THEN arg_max(mean, (step, draw)) END AS last_mean"""
_BETWEEN = """avg(mean) FILTER (WHERE run = ?) AS first_mean, avg(mean) FILTER (WHERE run = ?) AS last_mean"""


def pair(queries: Queries, a: Key, b: Key) -> Row:
    """Two rollouts and where they part.

    By tokens where both runs have the same tokenizer's ids for the shared part of their text, by characters always;
    ``parts_at_*`` null: they are the same, or one is the beginning of the other when lengths differ.
    """
    index = queries.index
    keys = (a, b)
    rids = [queries.find(key) for key in keys]
    rows = queries.rows(index.cursor(), rids)
    values = [
        _values(index, rid, ("prompt_text", "response_text", "content", "response_ids", "problem_id"))
        for rid in rids
    ]
    texts = [v.get("response_text") or v.get("content") or "" for v in values]
    ids = [v.get("response_ids") or [] for v in values]
    at = _parting(texts[0], texts[1])
    token = _parting(ids[0], ids[1]) if all(ids) else None
    return {
        "same_problem": values[0].get("problem_id") == values[1].get("problem_id"),
        "same_prompt": values[0].get("prompt_text") == values[1].get("prompt_text"),
        "same": texts[0] == texts[1],
        "parts_at_character": at,
        "parts_at_token": token,
        "common": texts[0][max(0, at - _AROUND) : at] if at is not None else texts[0][-_AROUND:],
        "sides": [
            {
                "row": row,
                "after": text[at : at + LONGEST_TEXT] if at is not None else "",
                "characters": len(text),
                "tokens": len(own),
                "token": _piece(index, rid, own, token),
            }
            for row, rid, text, own in zip(rows, rids, texts, ids, strict=True)
        ],
    }


def _parting(a: Any, b: Any) -> int | None:
    """The first position where two sequences differ; the shorter one's end where it begins the other; None: equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _piece(index: Index, rid: int, ids: list[int], at: int | None) -> Row | None:
    """The token at which a side leaves the other; None where it has ended."""
    if at is None or at >= len(ids):
        return None
    file, _ = index.file_of(rid)
    return {"id": ids[at], "text": Pieces(tokenizer(index, file)).of([ids[at]])[0]}


def _values(index: Index, rid: int, columns: tuple[str, ...]) -> dict[str, Any]:
    try:
        file, row = index.file_of(rid)
    except StopIteration:
        raise UserError("the rollout's file has gone: the run was resumed from an earlier step") from None
    return read_row(file.path, row, columns)


def _named(runs: list[str]) -> str:
    return ", ".join(f"'{r}'" for r in runs) or "any run"
