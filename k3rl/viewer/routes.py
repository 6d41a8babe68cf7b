"""The viewer's addresses. Each is a thin line from parameters to a question; answers are JSON.

What is refused is answered with ``{"error": sentence}`` and status 400 (403 and 401: who may ask). Numbers that JSON
lacks come as ``"NaN"``, ``"Infinity"``, ``"-Infinity"``. A *row* is an object of all indexed, derived and note columns
(`/api/columns` lists them) with ``rid`` as text and ``reward_components`` as an object. A *key* is
``{run, step, draw, sample}``: it names a rollout for good. Every ``filter`` that comes back is in the filter language
and can be given to `/api/rollouts` with the answer's ``run``.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field
from starlette.background import BackgroundTask

from k3rl.viewer import cells, compare, degeneracies, export, labelled, metrics, replay, rollout, sql
from k3rl.viewer.index import as_json
from k3rl.viewer.queries import Key, Selection
from k3rl.viewer.session import Session

Runs = Annotated[list[str], Query(alias="run")]
Json = dict[str, Any]


class Note(BaseModel):
    """A flag and a comment for one rollout."""

    run: str
    step: int
    draw: int
    sample: int
    flag: str = ""
    note: str = ""

    @property
    def key(self) -> Key:
        return Key(self.run, self.step, self.draw, self.sample)


class Sql(BaseModel):
    """A SELECT over the viewer's tables, and how many rows to answer with."""

    query: str = Field(max_length=100_000)
    limit: int = 1000


class Rescore(BaseModel):
    """A selection of rollouts and the reward to score them with."""

    run: list[str] = []
    filter: str = ""
    sort: str = ""
    descending: bool = False
    reward: str
    arguments: dict[str, Any] = {}
    limit: int = 200
    text_only: bool = False


def selection_of(run: Runs = [], filter: str = "", sort: str = "", descending: bool = False) -> Selection:  # noqa: B006
    return Selection(tuple(run), filter, sort, descending)


def _plain(answer: Json) -> Response:
    """JSON of what is JSON already: the framework would look at each of a million numbers again."""
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


def add_routes(app: FastAPI, session: Session) -> None:
    _runs(app, session)
    _rollouts(app, session)
    _questions(app, session)


def _runs(app: FastAPI, session: Session) -> None:
    @app.get("/api/state")
    def state() -> Json:
        return metrics.state(session)

    @app.get("/api/columns")
    def columns() -> Json:
        return metrics.columns(session.index)

    @app.get("/api/metrics")
    def metric_values(run: Runs, name: Annotated[list[str], Query()] = []) -> Json:  # noqa: B006
        return as_json(metrics.series(session.index, run, name))

    @app.get("/api/steps")
    def steps(run: Runs, by: str = "") -> Json:
        return as_json(metrics.steps(session.index, run, by))

    @app.get("/api/configs")
    def configs(run: Runs) -> Json:
        return as_json(metrics.configs(session.index, run))


def _rollouts(app: FastAPI, session: Session) -> None:
    queries = session.queries

    @app.get("/api/rollouts")
    def rollouts(
        run: Runs = [],  # noqa: B006
        filter: str = "",
        sort: str = "",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
    ) -> Json:
        return queries.page(selection_of(run, filter, sort, descending), offset, limit)

    @app.get("/api/export")
    def export_selection(
        run: Runs = [],  # noqa: B006
        filter: str = "",
        sort: str = "",
        descending: bool = False,
        format: export.Format = "parquet",
    ) -> Response:
        """A file: parquet, jsonl, csv, or datasets (a zipped folder for `datasets.load_from_disk`)."""
        rids = queries.rids(selection_of(run, filter, sort, descending))
        path = export.write_selected(session.index, rids, format, session.folder)
        return FileResponse(path, media_type=export.MEDIA[format], background=BackgroundTask(path.unlink))

    @app.get("/api/excerpts")
    def excerpts(rid: Annotated[list[int], Query(max_length=1000)]) -> Json:
        return rollout.excerpts(session.index, rid)

    @app.get("/api/rollout")
    def one(run: str, step: int, draw: int, sample: int) -> Response:
        rid = queries.find(Key(run, step, draw, sample))
        row = queries.rows(session.index.cursor(), [rid])[0]
        return _plain({**rollout.rollout(session.index, rid), "row": row})

    @app.get("/api/group")
    def group(run: str, step: int, draw: int) -> Json:
        """``{samples: [{row, texts, traces: {messages}}]}``, by sample."""
        return {"samples": rollout.group(session.index, queries.group(run, step, draw))}

    @app.get("/api/neighbours")
    def neighbours(
        of_run: str,
        step: int,
        draw: int,
        sample: int,
        run: Runs = [],  # noqa: B006
        filter: str = "",
        sort: str = "",
        descending: bool = False,
    ) -> Json:
        rid = queries.find(Key(of_run, step, draw, sample))
        return queries.neighbours(selection_of(run, filter, sort, descending), rid)

    @app.get("/api/notes")
    def all_notes(run: Runs = []) -> Json:  # noqa: B006
        """``{rows (with a flag or a note), counts: {notes, sft, preference} (lines of each export), left_out}``;
        ``left_out``: flagged rollouts that are no conversation of one turn."""
        return as_json(labelled.summary(queries, run))

    @app.get("/api/notes/export")
    def export_notes(run: Runs = [], form: labelled.Form = "notes") -> Response:  # noqa: B006
        return Response("".join(labelled.lines(queries, run, form)), media_type="application/jsonl")

    @app.post("/api/notes")
    def write_note(note: Note) -> Json:
        queries.find(note.key)
        session.index.notes.write(
            session.index.runs[note.run], (note.step, note.draw, note.sample), note.flag, note.note
        )
        session.index.version += 1
        return {"saved": True}


def _questions(app: FastAPI, session: Session) -> None:
    index = session.index

    @app.get("/api/cells")
    def cell_table(run: str, step: int | None = None, whole: bool = False) -> Json:
        """``{run, step, steps, cells, derived}``. Without ``step`` the newest; ``whole=true``: all steps together, and
        ``step`` is null. ``steps``: all that there are. A cell: ``{run, domain, effort, rollouts, groups, reward_mean,
        unscored_share, thinking_mean, sampled_mean, budget_mean, budget_used (thinking tokens over budget, mean),
        over_budget_share, truncated_share, zero_variance_groups, zero_variance_share, staleness_mean, staleness_max,
        trained, tokens_trained, tokens_share, teacher_kl, filter}``; null where there is nothing to say.
        ``derived``: ``{done, total, ready}``; until it is ready ``teacher_kl`` still grows."""
        return as_json(cells.cells(index, run, step, whole))

    @app.get("/api/degeneracies")
    def named_degeneracies(run: str, step: int | None = None) -> Json:
        """``{run, step, totals: {rollouts, groups, problems, domains}, degeneracies, derived}``. Each: ``{name, title,
        unit ("rollouts", "groups", "problems", "domains"), count (of units), of, rollouts (how many the filter
        selects), sentence, names (domains or problems, else []), filter, partial (the filter names only some of the
        problems), sort, descending, ready}``. All are listed, also those with a count of 0."""
        return as_json(degeneracies.degeneracies(index, run, step))

    @app.get("/api/compare")
    def over_time(problem_id: str, run: Runs = []) -> Json:  # noqa: B006
        """One problem over steps and runs (without ``run``: all): ``{problem_id, question, points}``. A point is a
        draw: ``{run, step, draw, rollouts, reward_mean, reward_min, reward_max, rewards (by sample, null unscored),
        sampled_mean, truncated_share}``, by run and step."""
        return as_json(compare.problem_over_time(index, run, problem_id))

    @app.get("/api/compare/problems")
    def all_problems(
        run: Runs, solved: float = 0.5, first: int | None = None, last: int | None = None, limit: int = 100
    ) -> Json:
        """One run, or two to set against each other: ``{runs, solved, total, always, never, changed}``; each of the
        three is ``{count, problems}``. A problem: ``{problem_id, domain, rollouts, draws, reward_mean, solved_share,
        first_mean, last_mean, change}``. Solved: reward above ``solved``. One run: first and last are its first and
        last draw (within steps ``first`` to ``last``); two runs: the first run and the second. ``changed``: largest
        change first."""
        return as_json(compare.problems(index, run, solved, first, last, limit))

    @app.get("/api/compare/pair")
    def two_rollouts(
        a_run: str,
        a_step: int,
        a_draw: int,
        a_sample: int,
        b_run: str,
        b_step: int,
        b_draw: int,
        b_sample: int,
    ) -> Json:
        """``{same_problem, same_prompt, same, parts_at_character, parts_at_token, common, sides: [a, b]}``.

        ``parts_at_*``: the first position where the responses differ (where one begins the other: its end), null where
        they are equal or have no tokens; ``common``: the end of what they share. A side: ``{row, after (text from
        there), characters, tokens, token: {id, text} or null}``."""
        keys = Key(a_run, a_step, a_draw, a_sample), Key(b_run, b_step, b_draw, b_sample)
        return as_json(compare.pair(session.queries, *keys))

    @app.post("/api/sql")
    def run_sql(asked: Sql) -> Json:
        """Body ``{query, limit}``: one SELECT over ``everything`` (all columns), ``rollouts``, ``derived``, ``notes``.

        ``{columns: [{name, type}], rows: [[...]], truncated, seconds_s}``; at most 10,000 rows and 10 seconds."""
        return sql.query(index, asked.query, asked.limit)

    @app.get("/api/rewards")
    def known_rewards() -> Json:
        """``{rewards: [names]}`` that `/api/rescore` takes."""
        return {"rewards": replay.allowed(session.rewards)}

    @app.post("/api/rescore")
    def rescore(asked: Rescore) -> Json:
        """Body: a selection (``run``, ``filter``, ``sort``, ``descending``, ``limit`` up to 2,000), ``reward``,
        ``arguments`` (numbers, words, flags by name), ``text_only`` (the reward reads no lost sandbox).

        ``{reward, summary, rows}``. A row: ``{run, step, draw, sample, problem_id, before, task_before,
        components_before, explanation_before, after, components_after,
        explanation_after, outcome, change, replayed, reason}``;
        ``task_before`` is what compares with ``after`` (the total before a length rule), ``reason`` why there is no
        ``after``. Summary: ``{rollouts, replayed, scored, not_replayed: {reason: count}, mean_before, mean_after,
        changed, other_best (groups whose best sample is another one now)}``. Takes up to two minutes."""
        return as_json(
            replay.replay(
                session.queries,
                selection_of(asked.run, asked.filter, asked.sort, asked.descending),
                asked.reward,
                asked.arguments,
                limit=asked.limit,
                text_only=asked.text_only,
                extra=session.rewards,
                modules=session.modules,
            )
        )
