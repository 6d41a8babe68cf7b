"""Every problem that was drawn is exactly once trained, dropped with a reason, or still in flight.

The draw's ordinal is the key. Groups are opened in order and settled in any; what is settled is kept as
counts, so the state stays as small as what is in flight. Owner: the pool; the recipe settles through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from k3rl.errors import RunError


class Ledger:
    """``open_draws`` are generating or handed over to the recipe and not settled yet."""

    def __init__(self) -> None:
        self.next_draw = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self._open: dict[int, str] = {}  # draw -> problem id

    @property
    def open_draws(self) -> set[int]:
        return set(self._open)

    def opened(self, draw: int, problem_id: str) -> None:
        if draw != self.next_draw:
            raise RunError(f"ledger: draw {draw} ('{problem_id}') came where draw {self.next_draw} was due")
        self._open[draw] = problem_id
        self.next_draw += 1

    def settle(self, draw: int, dropped: str = "") -> None:
        """The group of ``draw`` was trained on, or dropped for a reason."""
        if draw not in self._open:
            known = "was settled before" if 0 <= draw < self.next_draw else "was never drawn"
            raise RunError(f"ledger: draw {draw} cannot be {dropped or 'trained'}, it {known}")
        del self._open[draw]
        if dropped:
            self.dropped[dropped] += 1
        else:
            self.trained += 1

    def check(self, generating: Iterable[int], handed_over: Iterable[int]) -> None:
        """Against who really holds what. `RunError` names a draw that is lost, or held twice."""
        generating, handed_over = set(generating), set(handed_over)
        both = generating & handed_over
        missing = self.open_draws - generating - handed_over
        extra = (generating | handed_over) - self.open_draws
        for draws, what in ((both, "held twice"), (missing, "lost"), (extra, "settled, yet in flight")):
            if draws:
                names = ", ".join(f"{d} ('{self._open.get(d, '?')}')" for d in sorted(draws)[:5])
                raise RunError(f"ledger: {len(draws)} draws are {what}: {names}")
        settled = self.trained + sum(self.dropped.values())
        if self.next_draw != settled + len(self._open):
            raise RunError(f"ledger: {self.next_draw} draws, {settled} settled and {len(self._open)} open")

    def state_dict(self) -> dict[str, Any]:
        return {
            "next_draw": self.next_draw,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "open": [[draw, name] for draw, name in sorted(self._open.items())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_draw, self.trained = state["next_draw"], state["trained"]
        self.dropped = Counter(state["dropped"])
        self._open = dict(state["open"])
