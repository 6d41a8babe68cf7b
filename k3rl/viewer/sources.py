"""What there is to look at: runs below the paths a person gave. Found again every second, for runs come and go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from k3rl.errors import UserError
from k3rl.viewer.foreign import Foreign, check_file, data_files, groups_below, is_foreign

_NOT_RUNS = {"rollouts", "checkpoints", "tensorboard", "logs"}
_DEPTH = 3
_configs: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}


@dataclass(frozen=True, slots=True)
class Source:
    """One run. ``rollouts`` is where its parquet files are; ``only``: these of them. ``foreign``: they are copies."""

    name: str
    path: Path
    rollouts: Path
    only: tuple[Path, ...] = ()
    foreign: Foreign | None = None

    @property
    def notes_file(self) -> Path:
        return self.foreign.notes_file if self.foreign else self.path / "notes.jsonl"

    def files(self) -> list[Path]:
        """Its parquet files that are there now and whole."""
        found = self.only or sorted(self.rollouts.glob("*.parquet"))
        return [f for f in found if not f.name.startswith(".")]

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
    """Runs by name. A name stays with its folder for the life of the viewer. ``copies``: a folder for foreign files."""

    roots: list[Path]
    copies: Path
    _names: dict[Path, str] = field(default_factory=dict)
    _foreign: dict[Path, Foreign | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.roots = [p.resolve() for p in self.roots]
        for root in self.roots:
            if root.is_file():
                check_file(root)
            elif not root.is_dir():
                raise UserError(f"there is no run, file or folder '{root}'")

    @property
    def busy(self) -> bool:
        """Are foreign files still being copied?"""
        return any(f is not None and f.busy for f in self._foreign.values())

    def find(self) -> list[Source]:
        """All runs that are there now; below a folder without any, what other people's files there are."""
        found: dict[Path, Source] = {}
        for root in self.roots:
            folders = list(_run_folders(root, _DEPTH)) if root.is_dir() else []
            for folder in folders:
                found.setdefault(folder, Source(self._name(root, folder), folder, folder / "rollouts"))
            for path in [] if folders else groups_below(root) if root.is_dir() else [root]:
                found.setdefault(path, self._other(root, path))
        return sorted(found.values(), key=lambda s: s.name)

    def _other(self, root: Path, path: Path) -> Source:
        """Rows of ours are read where they are, others from their copies."""
        name = self._name(root, path)
        if path not in self._foreign:
            strange = any(is_foreign(f) for f in data_files(path))
            self._foreign[path] = Foreign(path, self.copies / f"{len(self._foreign)}") if strange else None
        foreign = self._foreign[path]
        if foreign is not None:
            foreign.refresh()
            return Source(name, path if path.is_dir() else foreign.folder, foreign.folder, foreign=foreign)
        files = tuple(data_files(path))
        folder = path if path.is_dir() else path.parent
        inside = folder.name == "rollouts" and (folder.parent / "config.yaml").is_file()
        return Source(name, folder.parent if inside else folder, folder, files)

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
    """A run has a config and rollouts by file; where rollouts lie in a folder for each step, it is not ours."""
    rollouts = folder / "rollouts"
    return (folder / "config.yaml").is_file() or (rollouts.is_dir() and not any(rollouts.glob("step*/")))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    if depth == 0:
        return
    for inner in sorted(p for p in folder.iterdir() if p.is_dir()):
        if inner.name not in _NOT_RUNS and not inner.name.startswith("."):
            yield from _run_folders(inner, depth - 1)
