"""A job's memory: where its run is on disk, how far it is, what it tells people and trackers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from k3rl.config.jobs import JobBase
from k3rl.config.load import dump_job
from k3rl.errors import RunError, UserError
from k3rl.models import ModelConfig
from k3rl.store import RunStore
from k3rl.store.run import step_of
from k3rl.tracking import Progress, Tracker
from k3rl.tracking.health import Watch
from k3rl.tracking.report import training_report

log = logging.getLogger(__name__)


class Journal(AbstractContextManager["Journal"]):
    """Open for the length of a job. ``steps()`` begins after the last checkpoint; what was written after that
    checkpoint is taken back first. A job that ends without all its steps done is a `RunError`."""

    def __init__(self, job: JobBase, steps: int) -> None:
        self.job, self.asked = job, steps
        self.store = RunStore.create(Path(job.runs) / job.name, dump_job(job))
        self.checkpoint = self.store.latest_checkpoint()
        self.done = step_of(self.checkpoint) + 1 if self.checkpoint else 0
        self.store.truncate_after(self.done - 1)
        self.tracker = Tracker(self.store, job.tracking, first_step=self.done)
        self.progress = Progress(job.name, steps, self.done)
        self.watch = Watch()
        self.store.set_status("running", steps_done=self.done, steps_asked=steps)
        if self.done:
            self.progress.say(f"{job.name}: resuming after step {self.done}/{steps}")

    @property
    def path(self) -> Path:
        return self.store.path

    def steps(self) -> Iterator[int]:
        yield from range(self.done, self.asked)

    def read_state(self, name: str) -> Any:
        """A JSON file of the checkpoint that is resumed; None at the start of a run."""
        return json.loads((self.checkpoint / name).read_text()) if self.checkpoint else None

    def record(self, step: int, metrics: dict[str, float], summary: str) -> None:
        """The step's numbers, with the times of its phases, to files, trackers and the terminal. A metric that
        leaves its healthy range is logged with what usually causes it."""
        metrics = {**metrics, **self.progress.take_times()}
        self.tracker.log(step, metrics)
        for line in self.watch(metrics):
            log.warning(line)
        self.done = step + 1
        self.store.set_status("running", steps_done=self.done, steps_asked=self.asked)
        self.progress.step(step, f"{summary}  {metrics['time/step_s']:.1f}s")

    def due(self, step: int, every: int) -> bool:
        """Is a checkpoint due after this step?"""
        return (step + 1) % every == 0 or step + 1 == self.asked

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.tracker.close()
            self.progress.close()
            if error is not None:
                reason = f"{type(error).__name__}: {error}"
                self.store.set_status("failed", steps_done=self.done, steps_asked=self.asked, reason=reason)
            elif self.done < self.asked:
                raise RunError(f"{self.path}: {self.done} of {self.asked} steps were done")
            else:
                if self.store.config["kind"] != "evaluate":  # which reports what it measured
                    training_report(self.store)
                self.store.set_status("finished", steps_done=self.done, steps_asked=self.asked)
        finally:
            self.store.close()


def latest_model(run: Path) -> Path:
    """The model folder of a run's last checkpoint, or the folder itself where it is a model already."""
    if (run / "config.json").is_file():
        return run
    checkpoint = RunStore.open(run).latest_checkpoint()
    if checkpoint is None:
        raise UserError(f"{run} has no checkpoint yet")
    return checkpoint / "trainer" / "model"


def resolved(model: ModelConfig, runs: Mapping[str, Path] | None = None) -> ModelConfig:
    """Paths that mean a run, ``@job`` of a pipeline's ``runs`` or a run's folder, become that of its last model."""
    if runs and model.path.startswith("@"):
        return model.model_copy(update={"path": str(latest_model(runs[model.path[1:]]))})
    folder = Path(model.path)
    if (folder / "config.yaml").is_file() and not (folder / "config.json").exists():
        return model.model_copy(update={"path": str(latest_model(folder))})
    return model
