"""`RunStore`: the folder of one run.

    config.yaml             the resolved config; config_hash.txt its hash
    metrics.jsonl           one object per step
    tensorboard/            the same for TensorBoard
    rollouts/step-000012.parquet
    checkpoints/step-000012/
    ledger.json             what became of every problem drawn
    status.json             running, finished or failed, and why
    report.md, report.json  when the job has ended

What a step leaves is written in the order rollouts, metrics, checkpoint, each whole or not there. A run that died
goes on from its last checkpoint; what was written after it is taken back first (`truncate_after`), so that nothing is
in the store twice.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from k3rl.errors import UserError
from k3rl.store.files import read_lines, replacing, replacing_folder, write_json
from k3rl.store.lock import RunLock
from k3rl.store.rows import ROLLOUT_SCHEMA

log = logging.getLogger(__name__)
_IGNORED = {"ray", "tracking", "runs"}
"""May change between two starts of one run, also in a pipeline's jobs: they don't shape results."""
_EXTENDABLE = ("steps",)
"""May grow: the run then goes on."""

GROUP_ROWS, GROUP_TOKENS = 512, 200_000
"""Most rows and tokens of a row group. A reader of one rollout decodes its group and no more; the thread that
writes holds the interpreter for one column of one group at a time."""
_NUMBERS = ("logprobs", "trainer_logprobs", "teacher_logprobs", "token_advantages")
PARQUET: dict[str, Any] = {
    "compression": "zstd",
    # log-probs are seldom the same twice: a dictionary of them costs time and is thrown away
    "use_dictionary": [
        name if not pa.types.is_list(ROLLOUT_SCHEMA.field(name).type) else f"{name}.list.element"
        for name in ROLLOUT_SCHEMA.names
        if name not in _NUMBERS and name != "reward_components"
    ],
}
"""How rollouts are encoded, as arguments of `pyarrow.parquet`."""


class RunStore:
    """See the module's docstring. `create` for the writer, `open` for readers."""

    def __init__(self, path: Path, lock: RunLock | None = None) -> None:
        self.path, self._lock = path, lock
        self._writer: ThreadPoolExecutor | None = None
        self._written: Future[Path] | None = None

    @classmethod
    def create(cls, path: Path | str, config_yaml: str) -> RunStore:
        """A new run, or an old one with the same config, to go on with.

        Raises `UserError` where the folder holds another run (naming the first key that differs), something else, or a
        run that another process is writing. More ``steps`` than before are no difference: the run then goes on.
        """
        path = Path(path)
        stored = path / "config.yaml"
        if path.exists() and not stored.exists() and any(p.name != ".lock" for p in path.iterdir()):
            raise UserError(f"{path} exists and is not a run: choose another name= or runs=")
        path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(path / ".lock")
        try:
            if stored.exists():
                _same_config(path, yaml.safe_load(stored.read_text()), yaml.safe_load(config_yaml))
        except UserError:
            lock.release()
            raise
        with replacing(stored) as temporary:
            temporary.write_text(config_yaml, encoding="utf-8")
        for leftover in [
            *path.glob("rollouts/.*.tmp"),
            *path.glob("checkpoints/.*.tmp"),
            *path.glob(".*.tmp"),
        ]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path | str) -> RunStore:
        """To read. Raises `UserError` where there is no run."""
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path} is not a run's folder: it has no config.yaml")
        return cls(path)

    def close(self) -> None:
        self.wait_for_rollouts()
        if self._writer is not None:
            self._writer.shutdown()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def config(self) -> dict[str, Any]:
        return yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))

    # -- what steps leave ----------------------------------------------------------------------------------

    def write_rollouts(self, step: int, rows: list[dict[str, Any]]) -> Path:
        """All rows of a step, in one file."""
        path = self._rollouts(step)
        with replacing(path) as temporary, pq.ParquetWriter(temporary, ROLLOUT_SCHEMA, **PARQUET) as file:
            for part in _row_groups(rows):
                file.write_table(pa.Table.from_pylist(part, schema=ROLLOUT_SCHEMA))
        return path

    def write_rollouts_beside(self, step: int, rows: Callable[[], list[dict[str, Any]]]) -> None:
        """`write_rollouts` in a thread, while its caller goes on; one step at a time. Whole before the step's
        checkpoint is. Where it fails, that is said, and the step's rollouts are missing: training goes on."""
        self.wait_for_rollouts()
        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._written = self._writer.submit(lambda: self.write_rollouts(step, rows()))

    def wait_for_rollouts(self) -> None:
        """Until what `write_rollouts_beside` began is on disk, or has failed."""
        written, self._written = self._written, None
        if written is None:
            return
        try:
            written.result()
        except Exception as error:  # the border of the writer
            log.error(
                "%s: the rollouts of a step were not written: %s: %s", self.path, type(error).__name__, error
            )

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """One line. Numbers that are not finite become null, for JSON has none."""
        line = json.dumps({"step": step, **{k: _json_number(v) for k, v in sorted(metrics.items())}})
        self._mend_last_line()
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _mend_last_line(self) -> None:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        with open(path, "rb+") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # all of it is read only where there is something to mend
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "metrics.jsonl")

    def rollout_files(self) -> list[Path]:
        return sorted((self.path / "rollouts").glob("step-*.parquet"))

    def truncate_after(self, step: int) -> None:
        """Take back all that was written after this step; -1: everything."""
        for file in self.rollout_files():
            if step_of(file) > step:
                file.unlink()
        kept = [m for m in self.metrics() if m["step"] <= step]
        with replacing(self.path / "metrics.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(m) + "\n" for m in kept), encoding="utf-8")
        for folder in self.checkpoints():
            if step_of(folder) > step:
                shutil.rmtree(folder)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Path]:
        """Whole ones, oldest first."""
        return sorted(p for p in (self.path / "checkpoints").glob("step-*") if p.is_dir())

    def latest_checkpoint(self) -> Path | None:
        found = self.checkpoints()
        return found[-1] if found else None

    @contextmanager
    def new_checkpoint(self, step: int, keep_last: int = 2, keep_every: int = 0) -> Iterator[Path]:
        """A folder to write into; it gets its name when it is whole. Then older ones go, by retention."""
        with replacing_folder(self.path / "checkpoints" / f"step-{step:06d}") as temporary:
            yield temporary
            self.wait_for_rollouts()
        for folder in self.checkpoints()[:-keep_last]:
            if not (keep_every and step_of(folder) % keep_every == 0):
                shutil.rmtree(folder)

    # -- the whole run -------------------------------------------------------------------------------------

    def write_ledger(self, ledger: dict[str, Any]) -> None:
        write_json(self.path / "ledger.json", ledger)

    def set_status(self, state: str, **facts: Any) -> None:
        """``running``, ``finished`` or ``failed``."""
        write_json(self.path / "status.json", {"state": state, "pid": os.getpid(), **facts})

    def status(self) -> dict[str, Any]:
        path = self.path / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def write_state(self, name: str, value: Any) -> None:
        """A small JSON file of a recipe's own."""
        write_json(self.path / name, value)

    def _rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step-{step:06d}.parquet"


def step_of(path: Path) -> int:
    """12 for ``step-000012`` and ``step-000012.parquet``."""
    return int(path.name.removeprefix("step-").removesuffix(".parquet"))


def _row_groups(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows that are read together, as many as the limits above let."""
    start, tokens = 0, 0
    for i, row in enumerate(rows):
        own = len(row.get("prompt_ids") or ()) + len(row.get("response_ids") or ())
        if i > start and (i - start == GROUP_ROWS or tokens + own > GROUP_TOKENS):
            yield rows[start:i]
            start, tokens = i, 0
        tokens += own
    if rows[start:]:
        yield rows[start:]


def _json_number(value: float) -> float | None:
    value = float(value)
    return value if value - value == 0 else None


def _same_config(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    old_flat, new_flat = dict(_flatten(old)), dict(_flatten(new))
    for key in [*new_flat, *(k for k in old_flat if k not in new_flat)]:
        if _IGNORED.intersection(key.split(".")) or old_flat.get(key) == new_flat.get(key):
            continue
        if key.split(".")[-1] in _EXTENDABLE and (new_flat.get(key) or 0) >= (old_flat.get(key) or 0):
            continue
        raise UserError(
            f"{path} holds a run with another config: '{key}' was {old_flat.get(key)!r} and is {new_flat.get(key)!r}; "
            "choose another name= or delete the folder"
        )


def _flatten(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
