"""Metrics to the run's JSONL and TensorBoard files, and to Weights & Biases, MLflow or trackio by config.

The run's own JSONL file is the truth. Whatever another tracker does, the run goes on: its first failure is logged, and
it gets nothing more.
"""

from __future__ import annotations

import logging
from typing import Protocol

from k3rl.config.jobs import TrackingConfig
from k3rl.store import RunStore
from k3rl.tracking.foreign import FOREIGN, Lane

log = logging.getLogger(__name__)


class _Board(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """One per run. ``first_step``: TensorBoard forgets what a run that died wrote from there on."""

    def __init__(self, store: RunStore, config: TrackingConfig, first_step: int = 0) -> None:
        self._store = store
        self._board: _Board | None = None
        try:
            self._board = _TensorBoard(store, first_step)
        except Exception as error:  # a full disk or a missing package is no reason not to train
            log.warning("tracker tensorboard is not used: %s", error)
        targets = {"wandb": config.wandb, "mlflow": config.mlflow, "trackio": config.trackio}
        self._lanes = [
            Lane(name, lambda name=name, target=target: FOREIGN[name](target, store))  # type: ignore[misc]
            for name, target in targets.items()
            if target
        ]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Returns as soon as the run's own files have the step."""
        self._store.log_metrics(step, metrics)
        if self._board is not None:
            try:
                self._board.log(step, metrics)
            except Exception as error:  # as above
                log.warning("tracker tensorboard failed and gets nothing more: %s", error)
                self._board = None
        for lane in self._lanes:
            lane.log(step, metrics)

    def close(self) -> None:
        """Waits for trackers that have not taken everything yet, but not for ever."""
        if self._board is not None:
            try:
                self._board.close()
            except Exception as error:  # as above
                log.warning("tracker tensorboard did not close: %s", error)
        for lane in self._lanes:
            lane.close()


class _TensorBoard:
    def __init__(self, store: RunStore, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(store.path / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
