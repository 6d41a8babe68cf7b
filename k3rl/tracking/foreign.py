"""Trackers that are other people's: Weights & Biases, MLflow, trackio. Each lives on a thread of its own.

A `Lane` owns one of them. The run puts metrics into its queue and never waits: a tracker that is slow, silent or gone
costs a warning. A run that is resumed goes on with the run that it had there, which ``tracker-NAME.json`` in its
folder remembers.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from k3rl.store import RunStore

log = logging.getLogger(__name__)
HELD_STEPS = 10_000
"""Steps that wait for a tracker that does not answer; more are not sent to it."""
CLOSE_S = 30.0
"""How long a finished run waits for what a tracker has not taken yet."""


class Foreign(Protocol):
    """What a lane drives, from its thread alone."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Lane:
    """``make`` opens the tracker; it runs on the lane's thread, as all else of the tracker does.

    Owner of its queue: `log` puts, the thread takes, `close` ends both. The first failure is logged and is the last
    that the tracker is asked.
    """

    def __init__(self, name: str, make: Callable[[], Foreign]) -> None:
        self.name = name
        self._items: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(HELD_STEPS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._over.is_set():
            return
        try:
            self._items.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._give_up(f"has not taken {HELD_STEPS} steps")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for what is queued, at most so long."""
        end_s = time.monotonic() + timeout_s
        if not self._over.is_set():
            try:
                self._items.put(None, timeout=timeout_s)
            except queue.Full:
                pass
        self._thread.join(max(0.0, end_s - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"has not taken {self._items.qsize()} entries after {timeout_s:.0f} s")

    def _give_up(self, why: str) -> None:
        if not self._over.is_set():
            self._over.set()
            log.warning("tracker %s %s and gets nothing more", self.name, why)

    def _run(self, make: Callable[[], Foreign]) -> None:
        try:
            tracker = make()
        except ModuleNotFoundError as error:
            return self._give_up(f"needs the package '{error.name}' (pip install 'k3rl[trackers]')")
        except BaseException as error:  # the border of a foreign service: its failure is normal
            return self._give_up(f"did not start: {_line(error)}")
        try:
            while not self._over.is_set() and (item := self._items.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except BaseException as error:  # as above; some libraries exit the thread
            self._give_up(f"failed: {_line(error)}")


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def remembered(store: RunStore, name: str, make: Callable[[], str] | None = None) -> str | None:
    """The id that this run has with a tracker; made, and kept, where there is none and ``make`` is given."""
    path = store.path / f"tracker-{name}.json"
    if path.is_file():
        return str(json.loads(path.read_text())["id"])
    if make is None:
        return None
    new = make()
    path.write_text(json.dumps({"id": new}))
    return new


class Wandb:
    """``target``: the project."""

    def __init__(self, target: str, store: RunStore) -> None:
        import wandb

        identity = remembered(store, "wandb", lambda: uuid.uuid4().hex[:12])
        self.run = wandb.init(
            project=target, id=identity, name=store.path.name, config=store.config, resume="allow"
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """``target``: address of a tracking server, a database as ``sqlite:///runs/mlflow.db`` (needs all of mlflow), or a
    folder. The experiment is called ``k3rl``.
    """

    def __init__(self, target: str, store: RunStore) -> None:
        if "://" not in target or target.startswith("file:"):
            os.environ.setdefault(
                "MLFLOW_ALLOW_FILE_STORE", "true"
            )  # mlflow 3 refuses folders unless told to
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric, self.client = Metric, MlflowClient(tracking_uri=target)
        known = remembered(store, "mlflow")
        self.run = known or remembered(store, "mlflow", lambda: self._create(store.path.name)) or ""
        if known:
            self.client.update_run(self.run, status="RUNNING")
        else:
            parameters = [Param(name, value) for name, value in flat(store.config)]
            for i in range(0, len(parameters), 100):  # as many as a call takes
                self.client.log_batch(self.run, params=parameters[i : i + 100])

    def _create(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name("k3rl")
        where = experiment.experiment_id if experiment else self.client.create_experiment("k3rl")
        return self.client.create_run(where, run_name=name).info.run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self.client.log_batch(
            self.run, metrics=[self.metric(mlflow_name(n), v, now_ms, step) for n, v in metrics.items()]
        )

    def close(self) -> None:
        self.client.set_terminated(self.run)


def mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and ``_-. :/``."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def flat(config: Any, name: str = "") -> list[tuple[str, str]]:
    """A nested config as dotted names and values, these at most as long as MLflow takes."""
    if isinstance(config, dict) and config:
        return [
            pair for key, value in config.items() for pair in flat(value, f"{name}.{key}" if name else key)
        ]
    return [(name, str(config)[:500])]


class Trackio:
    """``target``: the project. Runs of one name are one run to it."""

    def __init__(self, target: str, store: RunStore) -> None:
        import trackio

        self.run = trackio.init(
            project=target, name=store.path.name, config=store.config, resume="allow", embed=False
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


FOREIGN: dict[str, Callable[[str, RunStore], Foreign]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}
