"""Metrics to the run's JSONL and TensorBoard files, and to Weights & Biases, MLflow or trackio by config.

The run's own JSONL file is the truth. Whatever another tracker does, the run goes on: its first failure is logged, and
it gets nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from k3rl.config.jobs import TrackingConfig
from k3rl.store import RunStore

log = logging.getLogger(__name__)
Sink = Callable[[int, dict[str, float]], None]


class Tracker:
    """One per run. ``first_step``: TensorBoard forgets what a run that died wrote from there on."""

    def __init__(self, store: RunStore, config: TrackingConfig, first_step: int = 0) -> None:
        self._store = store
        self._sinks: dict[str, Sink] = {}
        self._closers: list[Callable[[], Any]] = []
        self._add("tensorboard", lambda: self._tensorboard(first_step))
        for name, target in (("wandb", config.wandb), ("mlflow", config.mlflow), ("trackio", config.trackio)):
            if target:
                self._add(name, lambda name=name, target=target: getattr(self, f"_{name}")(target))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._store.log_metrics(step, metrics)
        for name, sink in list(self._sinks.items()):
            try:
                sink(step, metrics)
            except Exception as error:  # the border of a foreign service: its failure is normal
                log.warning("tracker %s failed and gets nothing more: %s", name, error)
                del self._sinks[name]

    def close(self) -> None:
        for close in self._closers:
            try:
                close()
            except Exception as error:  # as above
                log.warning("a tracker did not close: %s", error)

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._sinks[name] = make()
        except Exception as error:  # as above; a missing package too
            log.warning("tracker %s is not used: %s", name, error)

    def _tensorboard(self, first_step: int) -> Sink:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self._store.path / "tensorboard"), purge_step=first_step)
        self._closers.append(writer.close)

        def sink(step: int, metrics: dict[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return sink

    def _wandb(self, project: str) -> Sink:
        import wandb

        run = wandb.init(
            project=project, name=self._store.path.name, config=self._store.config, resume="allow"
        )
        self._closers.append(run.finish)
        return lambda step, metrics: run.log(metrics, step=step)

    def _mlflow(self, address: str) -> Sink:
        import mlflow

        mlflow.set_tracking_uri(address)
        mlflow.start_run(run_name=self._store.path.name)
        self._closers.append(mlflow.end_run)
        return lambda step, metrics: mlflow.log_metrics(metrics, step=step)

    def _trackio(self, project: str) -> Sink:
        import trackio

        trackio.init(project=project, name=self._store.path.name, config=self._store.config)
        self._closers.append(trackio.finish)
        return lambda step, metrics: trackio.log(metrics, step=step)
