"""What a fleet counts, and the handle that measures commands."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from sandbox_client.types import ExecResult, Sandbox

COUNTERS = ("created", "from_warm", "restored", "recovered", "swept", "lost")
TIMES = ("create_s", "resume_s", "exec_s")


def _recent() -> deque[float]:
    return deque(maxlen=1000)


@dataclass(slots=True)
class FleetMetrics:
    """Counters since the start; seconds add up over sandboxes. The times are of the last 1000 calls."""

    created: int = 0
    from_warm: int = 0
    restored: int = 0
    recovered: int = 0  # from a snapshot, because the sandbox itself was gone
    swept: int = 0
    lost: int = 0
    awake_s: float = 0.0
    paused_s: float = 0.0
    create_s: deque[float] = field(default_factory=_recent)
    resume_s: deque[float] = field(default_factory=_recent)
    exec_s: deque[float] = field(default_factory=_recent)  # a command's own time included

    def as_dict(self, alive: int, paused: int) -> dict[str, float]:
        """Flat, for a run's metrics. ``pause_share`` is of the sandboxes' whole lifetime."""
        whole_s = self.awake_s + self.paused_s
        named = {k: float(getattr(self, k)) for k in COUNTERS}
        named |= {"alive": float(alive), "paused": float(paused)}
        named["pause_share"] = self.paused_s / whole_s if whole_s else 0.0
        for name in TIMES:
            seen = sorted(getattr(self, name))
            if seen:
                named[f"{name[:-2]}_p50_s"] = seen[len(seen) // 2]
                named[f"{name[:-2]}_p99_s"] = seen[min(int(0.99 * len(seen)), len(seen) - 1)]
        return named


class _Measured:
    """Everything of a `Sandbox`; ``exec`` is timed, also when it fails."""

    def __init__(self, sandbox: Sandbox, seen: deque[float]) -> None:
        self._sandbox, self._seen = sandbox, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    def __repr__(self) -> str:
        return repr(self._sandbox)

    async def exec(self, *args: Any, **options: Any) -> ExecResult:
        began = time.monotonic()
        try:
            return await self._sandbox.exec(*args, **options)
        finally:
            self._seen.append(time.monotonic() - began)


def measured(sandbox: Sandbox, metrics: FleetMetrics) -> Sandbox:
    """A handle to the same sandbox whose commands are counted in ``metrics.exec_s``."""
    return cast(Sandbox, _Measured(sandbox, metrics.exec_s))
