"""Snapshots on disk: ``<id>.tar``, written by the side of untrusted code and never unpacked on the host, and its
``<id>.json``, which comes last and makes it visible."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sandbox_client.types import SandboxSpec


class Snapshots:
    """Those in one folder, which several processes may share. Blocking calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, snapshot_id: str) -> Path:
        return self.folder / f"{snapshot_id}.tar"

    def find(self, name_or_id: str) -> str | None:
        """An id or a name -> the id."""
        for snapshot_id, meta in self.all().items():
            if name_or_id == snapshot_id or name_or_id in meta["names"]:
                return snapshot_id
        return None

    def all(self) -> dict[str, dict[str, Any]]:
        """By id: {"names", "created_at" (seconds since the epoch), "source" (a sandbox's id), "limits"}."""
        found = {}
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):
                found[file.stem] = json.loads(file.read_text())
        return found

    def keep(self, temporary: Path, names: list[str], spec: SandboxSpec, source: str) -> tuple[str, float]:
        """Give a finished tar its id and make it visible. -> (id, time)."""
        snapshot_id, now = str(uuid.uuid4()), time.time()
        os.replace(temporary, self.file(snapshot_id))
        meta = {"names": names, "created_at": now, "source": source, "limits": asdict(spec.limits)}
        note = self.file(snapshot_id).with_suffix(".json.tmp")
        note.write_text(json.dumps(meta))
        note.replace(note.with_suffix(""))
        return snapshot_id, now

    def delete(self, snapshot_id: str) -> None:
        """Idempotent."""
        for suffix in (".json", ".tar"):
            self.file(snapshot_id).with_suffix(suffix).unlink(missing_ok=True)
