"""What there is to look at: runs below the paths a person gave. Found again every second, for runs come and go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from k3rl.errors import UserError

_NOT_RUNS = {"rollouts", "checkpoints", "tensorboard", "logs"}
_DEPTH = 3
_configs: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}


@dataclass(frozen=True, slots=True)
class Source:
    """One run. ``rollouts`` is where its parquet files are."""

    name: str
    path: Path
    rollouts: Path

    @property
    def notes_file(self) -> Path:
        return self.path / "notes.jsonl"

    def config(self) -> dict[str, Any]:
        """What the run was started with; empty where it does not say. Raises `UserError` where it cannot be read."""
        file = self.path / "config.yaml"
        if not file.is_file():
            return {}
        stamp = (file.stat().st_size, file.stat().st_mtime_ns)
        if _configs.get(file, ((0, 0), {}))[0] != stamp:  # asked for every second
            try:
                read = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (yaml.YAMLError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise UserError(f"config.yaml of '{self.name}' cannot be read: {reason}") from error
            _configs[file] = (stamp, read if isinstance(read, dict) else {})
        return _configs[file][1]

    def status(self) -> dict[str, Any]:
        """What the job last said of itself. Raises `UserError` where it cannot be read."""
        file = self.path / "status.json"
        if not file.is_file():
            return {}
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"status.json of '{self.name}' cannot be read: {error}") from error
        return read if isinstance(read, dict) else {}


@dataclass(slots=True)
class Sources:
    """Runs by name. A name stays with its folder for the life of the viewer."""

    roots: list[Path]
    _names: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.roots = [p.resolve() for p in self.roots]
        for root in self.roots:
            if not root.is_dir():
                raise UserError(f"there is no run or folder of runs '{root}'")

    def find(self) -> list[Source]:
        """All runs that are there now."""
        found: dict[Path, Source] = {}
        for root in self.roots:
            for folder in _run_folders(root, _DEPTH):
                found.setdefault(folder, Source(self._name(root, folder), folder, folder / "rollouts"))
        return sorted(found.values(), key=lambda s: s.name)

    def _name(self, root: Path, folder: Path) -> str:
        if folder not in self._names:
            below = folder.relative_to(root).as_posix()
            inside = is_run(root) or len(self.roots) > 1
            name = root.name if below == "." else f"{root.name}/{below}" if inside else below
            taken = set(self._names.values())
            self._names[folder] = next(
                n for n in (name, *(f"{name}~{i}" for i in range(2, 1000))) if n not in taken
            )
        return self._names[folder]


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "rollouts").is_dir()


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    if depth == 0:
        return
    for inner in sorted(p for p in folder.iterdir() if p.is_dir()):
        if inner.name not in _NOT_RUNS and not inner.name.startswith("."):
            yield from _run_folders(inner, depth - 1)
