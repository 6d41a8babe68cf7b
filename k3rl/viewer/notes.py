"""What people write about rollouts: `notes.jsonl` beside the run, an object a line; a rollout's last one counts."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from k3rl.errors import UserError
from k3rl.viewer.sources import Source

FLAGS = ("good", "bad", "look")
_LONGEST = 20_000
Key = tuple[int, int, int]


@dataclass(slots=True)
class Notes:
    """Files are the truth; the table ``notes`` is there to be joined."""

    _db: duckdb.DuckDBPyConnection
    damaged: dict[str, int] = field(default_factory=dict)
    _stamps: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._db.execute(
            "CREATE TABLE notes (run VARCHAR, step INTEGER, draw BIGINT, sample INTEGER, flag VARCHAR, note VARCHAR, "
            "time DOUBLE)"
        )

    def refresh(self, sources: list[Source]) -> bool:
        """Read files that changed. Returns whether any did."""
        changed = False
        for source in sources:
            file = source.notes_file
            stamp = (file.stat().st_size, file.stat().st_mtime_ns) if file.exists() else (0, 0)
            if self._stamps.get(file, (0, 0)) != stamp:
                self._stamps[file] = stamp
                self._load(source)
                changed = True
        return changed

    def write(self, source: Source, key: Key, flag: str, note: str) -> None:
        """Append. An empty flag and note take an earlier one back. Raises `UserError`."""
        if flag and flag not in FLAGS:
            raise UserError(f"a flag is one of {', '.join(FLAGS)}, not '{flag}'")
        if len(note) > _LONGEST:
            raise UserError(f"a note has at most {_LONGEST} characters; this one has {len(note)}")
        step, draw, sample = key
        line = json.dumps(
            {
                "step": step,
                "draw": draw,
                "sample": sample,
                "flag": flag,
                "note": note,
                "time": round(time.time(), 3),
            },
            ensure_ascii=False,
        )
        with self._lock:
            _append(source.notes_file, line)
            self._stamps.pop(source.notes_file, None)
            self._load(source)

    def _load(self, source: Source) -> None:
        last, damaged = notes_of(source)
        self.damaged[source.name] = damaged
        cursor = self._db.cursor()
        cursor.begin()
        cursor.execute("DELETE FROM notes WHERE run = ?", [source.name])
        for (step, draw, sample), n in last.items():
            cursor.execute(
                "INSERT INTO notes VALUES (?, ?, ?, ?, ?, ?, ?)",
                [source.name, step, draw, sample, n["flag"] or None, n["note"] or None, n["time"]],
            )
        cursor.commit()
        cursor.close()


def notes_of(source: Source) -> tuple[dict[Key, dict[str, Any]], int]:
    """By (step, draw, sample), and how many lines could not be read: a kill may have cut one short."""
    found: dict[Key, dict[str, Any]] = {}
    damaged = 0
    file = source.notes_file
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
            key = (int(line["step"]), int(line["draw"]), int(line["sample"]))
            found[key] = {k: line.get(k) or "" for k in ("flag", "note")} | {
                "time": float(line.get("time", 0))
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            damaged += 1
    return {key: n for key, n in found.items() if n["flag"] or n["note"]}, damaged


def _append(file: Path, line: str) -> None:
    """One write, so that two viewers' lines don't mix; after a line that a kill cut short, on a new line."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = "\n" + line
        os.write(descriptor, (line + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
