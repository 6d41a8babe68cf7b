"""The files that a trajectory made, for judges and people: read in a fork of its sandbox, small ones only."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sandbox_client import Sandbox

MAX_FILES = 32
MAX_BYTES = 64 << 10
"""Of one file; a longer one keeps its head and its tail."""
DEPTH = 6


async def collect(sandbox: Sandbox, patterns: Sequence[str]) -> dict[str, str]:
    """Path and text of the files below the home folder whose path fits one of the patterns (``*`` crosses folders), by
    path. Links are not followed; bytes that are no UTF-8 become U+FFFD. Raises `sandbox_client.SandboxError`."""
    home = (await sandbox.exec(["pwd"])).stdout.strip()
    found: dict[str, int] = {}
    for file in await sandbox.list_files(home, depth=DEPTH):
        path = file.path.removeprefix(home).lstrip("/")
        if file.type == "file" and any(fnmatchcase(path, p) for p in patterns):
            found[path] = file.size_bytes
    kept = {}
    for path in sorted(found)[:MAX_FILES]:
        content = await sandbox.read_file(f"{home}/{path}")
        if len(content) > MAX_BYTES:
            half, missing = MAX_BYTES // 2, len(content) - MAX_BYTES
            content = content[:half] + f"\n[{missing} bytes left out]\n".encode() + content[-half:]
        kept[path] = content.decode("utf-8", "replace")
    return kept
