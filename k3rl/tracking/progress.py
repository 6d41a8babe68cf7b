"""What a person sees while a job runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """``phase`` measures time; ``take_times`` hands the step's phases over as ``time/<phase>_s``."""

    def __init__(self, job: str, steps: int, done: int = 0, console: Console | None = None) -> None:
        self.job, self.steps = job, steps
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        main = threading.current_thread() is threading.main_thread()
        self._live = self._console.is_terminal and main  # jobs side by side have no line of their own
        self._times: dict[str, float] = {}
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        if self._live:
            self._whole = self._bars.add_task(job, total=steps, completed=done, note="")
            self._part = self._bars.add_task("", total=1, note="", visible=False)
            self._bars.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time of the same phase adds up within a step."""
        started = time.monotonic()
        if self._live:
            self._bars.update(
                self._part, description=f"  {name}", total=None, completed=0, note="", visible=True
            )
        try:
            yield
        finally:
            self._times[name] = self._times.get(name, 0.0) + time.monotonic() - started
            if self._live:
                self._bars.update(self._part, visible=False)

    def take_times(self) -> dict[str, float]:
        times = {f"time/{name}_s": seconds for name, seconds in self._times.items()}
        times["time/step_s"] = sum(self._times.values())
        self._times = {}
        return times

    def rollout(self, done: int, wanted: int, tokens_per_s: float) -> None:
        """Trajectories completed in this step, against lambda times N times K."""
        if self._live:
            note = f"{tokens_per_s:,.0f} tokens/s"
            self._bars.update(self._part, description="  rollout", completed=done, total=wanted, note=note)

    def step(self, step: int, summary: str) -> None:
        """A step is done. ``summary``: its numbers, for people."""
        if self._live:
            self._bars.update(self._whole, completed=step + 1, note=summary)
        self._console.print(f"{self.job}  step {step + 1}/{self.steps}  {summary}", markup=False)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._live:
            self._bars.stop()
