"""Which columns a rollout has, and where each of them is kept.

Three places, by price. *Indexed* columns are one value a row and live in the viewer's table: filters and sorts over a
million rows read nothing else. *Derived* columns are computed from a row's tokens in the background and joined when
asked for. *Text* columns stay in the parquet files and are searched there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

Kind = Literal["number", "text", "flag", "components"]
Place = Literal["index", "derived", "file", "notes"]


@dataclass(frozen=True, slots=True)
class Column:
    """``kind`` decides which comparisons make sense; ``meaning`` is shown to people."""

    name: str
    kind: Kind
    place: Place
    meaning: str = ""
    sql_type: str = ""


def _index(kind: Kind, sql_type: str, **meanings: str) -> list[Column]:
    return [Column(name, kind, "index", meaning, sql_type) for name, meaning in meanings.items()]


STORED = [
    *_index("number", "INTEGER", step="step in which the row left the run"),
    *_index("text", "VARCHAR", problem_id="the problem"),
    *_index("number", "BIGINT", draw="ordinal of the draw of its problem: names the group"),
    *_index("number", "INTEGER", sample="which of the group's samples"),
    *_index(
        "text",
        "VARCHAR",
        domain="family of tasks",
        effort="how much thinking was asked for",
        status="complete, truncated or failed",
        stop_reason="why generation ended",
        error="what went wrong",
        fate="trained, or dropped with its reason",
    ),
    *_index("number", "DOUBLE", reward="total; empty where it was not scored"),
    *_index("text", "VARCHAR", reward_outcome="scored, or why not"),
    *_index(
        "components", "STRUCT(name VARCHAR, value DOUBLE)[]", reward_components="the reward's named parts"
    ),
    *_index("number", "DOUBLE", advantage="the trajectory's"),
    *_index(
        "number",
        "INTEGER",
        policy_version="trainer's version when trained on",
        started_step="step of its first token",
        finished_step="step of its last token",
    ),
    *_index("number", "DOUBLE", staleness_mean="mean version distance of its tokens"),
    *_index(
        "number",
        "INTEGER",
        staleness_max="largest version distance",
        thinking_tokens="sampled tokens of thinking",
        sampled_tokens="tokens the policy sampled",
        budget_tokens="budget b0",
        reference_length="reference length l0",
        turns="turns of the policy",
    ),
]
GROUP = [
    *_index("number", "INTEGER", group_size="rows of its group in this step"),
    *_index(
        "number",
        "DOUBLE",
        group_reward_mean="mean reward of its group",
        group_reward_std="spread of rewards in its group; 0: no signal",
    ),
    *_index(
        "number",
        "INTEGER",
        group_scored="rows of its group that have a reward",
        group_truncated="rows of its group that a limit ended",
    ),
    *_index("flag", "BOOLEAN", component_conflict="some components are positive and some negative"),
]
DERIVED = [
    Column("prompt_tokens", "number", "derived", "tokens of the prompt", "INTEGER"),
    Column("response_tokens", "number", "derived", "tokens after the prompt, whoever wrote them", "INTEGER"),
    Column("logprob_gap_mean", "number", "derived", "mean |trainer − engine log-prob|", "DOUBLE"),
    Column("logprob_gap_max", "number", "derived", "largest |trainer − engine log-prob|", "DOUBLE"),
    Column("teacher_kl", "number", "derived", "mean of engine − teacher log-prob, nats a token", "DOUBLE"),
    Column(
        "versions", "number", "derived", "policy versions that wrote it: above 1, it was paused", "INTEGER"
    ),
    Column(
        "repeated_calls", "number", "derived", "how often its most frequent tool call was made", "INTEGER"
    ),
    Column("duplicates", "number", "derived", "others of its group with the same answer", "INTEGER"),
]
NOTES = [
    Column("flag", "text", "notes", "what a person marked it as", "VARCHAR"),
    Column("note", "text", "notes", "what a person wrote", "VARCHAR"),
]
TEXTS = [
    Column("text", "text", "file", "prompt and response together"),
    Column("prompt_text", "text", "file", "exact prompt, special tokens visible"),
    Column("response_text", "text", "file", "exact response, special tokens visible"),
    Column("reasoning", "text", "file", "the think channel"),
    Column("content", "text", "file", "the response channel"),
    Column("messages_json", "text", "file", "the problem's messages"),
    Column("reward_explanation", "text", "file", "what the reward said"),
    Column("judge_trace_json", "text", "file", "what the judge did"),
    Column("sandbox_json", "text", "file", "its sandbox"),
    Column(
        "turns_json", "text", "file", "the messages that followed the prompt, of rows that have no tokens"
    ),
]
RUN = Column("run", "text", "index", "the run's name", "VARCHAR")
NOT_SCALAR = {
    *(c.name for c in TEXTS),
    "prompt_ids",
    "response_ids",
    "sampled_mask",
    "channels",
    "logprobs",
    "policy_versions",
    "trainer_logprobs",
    "teacher_logprobs",
    "token_advantages",
    "timings_json",
}


def known_columns(extra: Mapping[str, Column]) -> dict[str, Column]:
    """All columns by name; ``extra`` are those that only some file has."""
    return {c.name: c for c in (RUN, *STORED, *GROUP, *DERIVED, *NOTES, *TEXTS, *extra.values())}


def extra_columns(schema: pa.Schema) -> list[Column]:
    """Columns of a file that no schema of ours knows and that are one value a row."""
    known = {c.name.lower() for c in (RUN, *STORED, *GROUP, *DERIVED, *NOTES, *TEXTS)} | NOT_SCALAR | {"rid"}
    found = []
    for field in schema:
        kind = _scalar_kind(field.type)
        if field.name.lower() not in known and kind:
            sql_type = {"number": "DOUBLE", "flag": "BOOLEAN", "text": "VARCHAR"}[kind]
            found.append(Column(field.name, kind, "index", "not a column of k3rl's own", sql_type))
    return found


def _scalar_kind(kind: pa.DataType) -> Kind | None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "flag"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_temporal(kind):
        return "text"
    return None


def quoted(name: str) -> str:
    """A name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
