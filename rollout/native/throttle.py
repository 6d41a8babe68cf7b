"""How many sequences may run at once: the report's automatic throttle on three signals.

Source: spec/02 §3 (report §5.3.1): concurrency follows active requests, queued requests and the utilisation
of the KV cache; it is high early in a rollout and falls as contexts grow.
"""

from __future__ import annotations


class Throttle:
    """A limit on concurrency that shrinks by a tenth under pressure and grows by an eighth when there is
    room.

    Utilisation is the share of the KV budget that the active sequences claim. Between ``low`` and ``high``
    the limit rests, so that it does not swing: a sequence that is admitted and soon preempted was prefilled
    in vain.
    """

    def __init__(self, max_active: int, low: float = 0.75, high: float = 0.95) -> None:
        self._max, self._low, self._high = max_active, low, high
        self._limit = max_active

    def limit(self, active: int, queued: int, utilisation: float) -> int:
        """At most how many may be active now. At least 1."""
        if utilisation >= self._high:
            self._limit = min(self._limit, max(1, active - max(1, active // 10)))
        elif utilisation <= self._low and queued and active >= self._limit:
            self._limit = min(self._max, self._limit + max(1, self._limit // 8))
        return self._limit

    def preempted(self, active: int) -> None:
        """The cache overflowed: so many were left running, and no more than that is safe for now."""
        self._limit = max(1, active)

    def reset(self) -> None:
        """Everything left the engine: contexts are short again."""
        self._limit = self._max
