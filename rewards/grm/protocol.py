"""The judge's compulsory protocol as a state machine: read, write a rubric, score every candidate, record.

Source: spec/02 §5. A judge is an agent; a `JudgeSession` offers it tools for these and nothing else. Steps out of
order, missing or malformed are answered with the reason, a bounded number of times; then the session is void. A session
without a record is void too: a verdict is never read out of prose, and what a candidate wrote reaches the judge as data
only, as the answer to `read_candidate`, so that no text can take a step.

    read      every candidate's text, and every file it made, in any order, at least once
    rubric    criteria with weights; the problem's own must be among them
    scored    each candidate on each criterion, 0 to 10, with a justification
    recorded  the scorepad is closed; the winner follows from the scores
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rewards.api import JudgeError

MAX_CRITERIA = 12
BEST = 10.0
"""Scores go from 0 to this."""


class Stage(StrEnum):
    """How far a session is."""

    READ = "read"
    """Candidates are being read."""
    SCORE = "score"
    """The rubric is written; candidates are being scored."""
    RECORDED = "recorded"
    """The verdict stands; nothing can be changed."""
    VOID = "void"
    """Too many wrong steps, or the judge stopped before it had recorded. Counts as no judgement."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """One line of a rubric. Weights are relative."""

    name: str
    description: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a tool: what was asked, what was answered, and whether it counted."""

    tool: str
    arguments: Mapping[str, Any]
    answer: str
    accepted: bool


class Refused(Exception):
    """A step that does not count; its text goes back to the judge."""


@dataclass(slots=True)
class JudgeSession:
    """One judgement of candidates, by label. ``criteria`` are the problem's own: the judge's rubric must hold them.

    Whoever drives the judge calls `call` with what it asked for, and `finish` when it has stopped.
    """

    question: str
    candidates: Mapping[str, str]
    criteria: Sequence[Criterion] = ()
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What candidates made besides their text: label, path, content."""
    max_refusals: int = 3
    stage: Stage = Stage.READ
    rubric: list[Criterion] = field(default_factory=list)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """The scorepad: label, criterion, score."""
    justifications: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    tokens: int = 0
    cost: float = 0.0
    """Money, in the endpoint's currency."""
    _seen: set[str] = field(default_factory=set)
    _opened: set[tuple[str, str]] = field(default_factory=set)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """What the judge may call, as chat endpoints take it."""
        return TOOLS if any(self.files.values()) else [t for t in TOOLS if t is not READ_FILE]

    def call(self, tool: str, arguments: Mapping[str, Any] | str) -> str:
        """Take one step; returns the answer for the judge. ``arguments``: a mapping, or JSON text as models write."""
        if self.stage in (Stage.RECORDED, Stage.VOID):
            return self._note(tool, {}, f"refused: the judgement is {self.stage}", False)
        try:
            parsed = self._parsed(arguments)
            answer = self._tool(tool)(parsed)
        except Refused as refusal:
            answer = self._note(tool, {"raw": str(arguments)[:2000]}, f"refused: {refusal}", False)
            if sum(not s.accepted for s in self.steps) > self.max_refusals:
                self.stage = Stage.VOID
            return answer
        return self._note(tool, parsed, answer, True)

    def finish(self) -> None:
        """The judge says no more. Without a record the session is void."""
        if self.stage is not Stage.RECORDED:
            self.stage = Stage.VOID

    @property
    def void(self) -> bool:
        return self.stage is Stage.VOID

    def totals(self) -> dict[str, float]:
        """Weighted mean score of each candidate, 0 to 10. Raises `JudgeError` before the record."""
        if self.stage is not Stage.RECORDED:
            raise JudgeError(f"a judgement that is {self.stage}, not recorded, has no scores")
        weight = sum(c.weight for c in self.rubric)
        return {
            label: sum(c.weight * row[c.name] for c in self.rubric) / weight
            for label, row in self.scores.items()
        }

    def due(self) -> dict[str, Any]:
        """The next step in order, as the one tool that does it, its schema narrowed to what would be accepted. For
        judges that are led through the protocol by constrained decoding."""
        unread = [x for x in self.candidates if x not in self._seen]
        unscored = [x for x in self.candidates if x not in self.scores]
        if self.stage is Stage.READ and unread:
            return _tool("read_candidate", "Read this candidate.", {"candidate": _one_of(unread[:1])})
        if self.stage is Stage.READ and (left := self._unread_files()):
            label, path = left[0]
            where = {"candidate": _one_of([label]), "path": _one_of([path])}
            return _tool("read_file", "Read this file of the candidate's.", where)
        if self.stage is Stage.READ:
            names = {"enum": [c.name for c in self.criteria]} if self.criteria else {"maxLength": 60}
            count = len(self.criteria) or 3
            row = {
                "name": {"type": "string", **names},
                "description": {"type": "string", "maxLength": 100},
                "weight": {"type": "integer", "minimum": 1, "maximum": 5},
            }
            rows = {
                "type": "array", "items": {"type": "object", "properties": row, "required": list(row)},
                "minItems": count if self.criteria else 1, "maxItems": count,
            }  # fmt: skip
            return _tool("write_rubric", "Write the rubric.", {"criteria": rows})
        if unscored:
            score = {"type": "integer", "minimum": 0, "maximum": int(BEST)}
            scores = {c.name: score for c in self.rubric}
            return _tool(
                "score_candidate",
                "Score this candidate on each criterion, and say why.",
                {
                    "candidate": _one_of(unscored[:1]),
                    "scores": {"type": "object", "properties": scores, "required": list(scores)},
                    "justification": {"type": "string", "minLength": 1, "maxLength": 200},
                },
            )
        return _tool("record", "Close the scorepad.", {})

    # -- tools

    def _tool(self, name: str) -> Any:
        tools = {
            "read_candidate": self._read,
            "read_file": self._read_file,
            "write_rubric": self._write_rubric,
            "score_candidate": self._score,
            "record": self._record,
        }
        if name not in tools:
            raise Refused(f"there is no tool '{name}'; there are {', '.join(tools)}")
        return tools[name]

    def _read(self, arguments: Mapping[str, Any]) -> str:
        label = self._label(arguments)
        self._seen.add(label)
        made = self.files.get(label, {})
        listed = {"files": {path: len(text) for path, text in made.items()}} if made else {}
        return as_data({"candidate": label, "text": self.candidates[label], **listed})

    def _read_file(self, arguments: Mapping[str, Any]) -> str:
        label, path = self._label(arguments), arguments.get("path")
        made = self.files.get(label, {})
        if not isinstance(path, str) or path not in made:
            raise Refused(f"candidate {label} has no such file; it has: {', '.join(made) or 'none'}")
        self._opened.add((label, path))
        return as_data({"candidate": label, "path": path, "content": made[path]})

    def _unread_files(self) -> list[tuple[str, str]]:
        return [(x, path) for x, made in self.files.items() for path in made if (x, path) not in self._opened]

    def _write_rubric(self, arguments: Mapping[str, Any]) -> str:
        if missing := [label for label in self.candidates if label not in self._seen]:
            raise Refused(f"read every candidate first; not read: {', '.join(missing)}")
        if left := self._unread_files():
            raise Refused(
                f"read every file first; not read: {', '.join(f'{p} of {x}' for x, p in left[:10])}"
            )
        if self.stage is not Stage.READ:
            raise Refused("the rubric is written and stays")
        rows = arguments.get("criteria")
        if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_CRITERIA:
            raise Refused(f"'criteria' must be a list of 1 to {MAX_CRITERIA}")
        rubric = [_criterion(row) for row in rows]
        names = [c.name for c in rubric]
        if len(set(names)) < len(names):
            raise Refused("two criteria have one name")
        if absent := [c.name for c in self.criteria if c.name not in names]:
            raise Refused(f"the rubric must hold the problem's own criteria: {', '.join(absent)}")
        own = {c.name: c for c in self.criteria}  # a judge may add criteria; it may not reweigh the problem's
        self.rubric = [own.get(c.name, c) for c in rubric]
        self.stage = Stage.SCORE
        return f"rubric of {len(rubric)} criteria; score each of {', '.join(self.candidates)}"

    def _score(self, arguments: Mapping[str, Any]) -> str:
        if self.stage is not Stage.SCORE:
            raise Refused("write the rubric before you score")
        label = self._label(arguments)
        if label in self.scores:
            raise Refused(f"candidate {label} is scored")
        given = arguments.get("scores")
        names = [c.name for c in self.rubric]
        if not isinstance(given, Mapping) or set(given) != set(names):
            raise Refused(f"'scores' must give a number for each of: {', '.join(names)}")
        justification = arguments.get("justification")
        if not isinstance(justification, str) or not justification.strip():
            raise Refused("'justification' must say why")
        self.scores[label] = {
            name: _number(given[name], f"the score of '{name}'", 0.0, BEST) for name in names
        }
        self.justifications[label] = justification
        left = [x for x in self.candidates if x not in self.scores]
        return f"scored; left: {', '.join(left)}" if left else "all are scored: record"

    def _record(self, arguments: Mapping[str, Any]) -> str:
        if self.stage is not Stage.SCORE:
            raise Refused("read, write a rubric and score before you record")
        if left := [x for x in self.candidates if x not in self.scores]:
            raise Refused(f"not scored: {', '.join(left)}")
        self.stage = Stage.RECORDED
        return "recorded"

    # -- checks

    def _label(self, arguments: Mapping[str, Any]) -> str:
        label = arguments.get("candidate")
        if not isinstance(label, str) or label not in self.candidates:
            raise Refused(f"'candidate' must be one of {', '.join(self.candidates)}")
        return label

    def _parsed(self, arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError as error:
                raise Refused(f"the arguments are no JSON: {error.msg} at character {error.pos}") from None
        if not isinstance(arguments, Mapping):
            raise Refused("the arguments must be an object")
        return arguments

    def _note(self, tool: str, arguments: Mapping[str, Any], answer: str, accepted: bool) -> str:
        self.steps.append(Step(tool, arguments, answer, accepted))
        return answer

    def trace(self) -> dict[str, Any]:
        """Everything a person needs to check the judgement, as JSON. Texts of candidates are left out."""
        return {
            "stage": str(self.stage),
            "rubric": [
                {"name": c.name, "description": c.description, "weight": c.weight} for c in self.rubric
            ],
            "scores": self.scores,
            "justifications": self.justifications,
            "steps": [
                {"tool": s.tool, "accepted": s.accepted, **({} if s.accepted else {"answer": s.answer})}
                for s in self.steps
            ],
            "tokens": self.tokens,
            "cost": self.cost,
        }


def as_data(value: Any) -> str:
    """JSON without any chat format's structure tokens: ``<`` is escaped, which JSON reads as the same text."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def _criterion(row: Any) -> Criterion:
    if not isinstance(row, Mapping) or not isinstance(row.get("name"), str) or not row["name"].strip():
        raise Refused("each criterion needs a 'name'")
    description = row.get("description", "")
    if not isinstance(description, str):
        raise Refused(f"the description of '{row['name']}' must be text")
    return Criterion(row["name"].strip(), description, _number(row.get("weight", 1.0), "a weight", 1e-6, 1e6))


def _number(value: Any, what: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{what} must be a number")
    if not low <= value <= high:
        raise Refused(f"{what} must be from {low:g} to {high:g}, it is {value:g}")
    return float(value)


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _one_of(labels: Sequence[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(labels)}


_LABEL = {"type": "string", "description": "The candidate's label."}
READ_FILE = _tool(
    "read_file",
    "Read a file that a candidate made. Read all of them first.",
    {"candidate": _LABEL, "path": {"type": "string"}},
)
TOOLS = [
    _tool("read_candidate", "Read what a candidate wrote. Read all of them first.", {"candidate": _LABEL}),
    READ_FILE,
    _tool(
        "write_rubric",
        "Write the rubric that every candidate is then scored by. Once, after all are read.",
        {
            "criteria": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "weight": {"type": "number"},
                    },
                    "required": ["name", "description", "weight"],
                },
            }
        },
    ),
    _tool(
        "score_candidate",
        "Score one candidate from 0 to 10 on each criterion of the rubric, and say why.",
        {
            "candidate": _LABEL,
            "scores": {"type": "object", "additionalProperties": {"type": "number"}},
            "justification": {"type": "string"},
        },
    ),
    _tool("record", "Close the scorepad. Only after every candidate is scored.", {}),
]
"""All tools, as chat endpoints take them."""
