"""Jobs in their order, each started from the artefacts of earlier ones; what is finished and unchanged is skipped.

A job waits for those that it refers to as ``@name`` and for nothing else: with ``parallel`` above 1, others run beside
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from k3rl.config.distill import RolloutsData
from k3rl.config.jobs import JobBase, PipelineJob, RayConfig, references
from k3rl.config.load import dump_job
from k3rl.data.config import JsonlData
from k3rl.errors import UserError
from k3rl.recipes.journal import resolved
from k3rl.recipes.launch import ray_cluster
from k3rl.recipes.preflight import with_models, with_parts
from k3rl.store import RunStore
from k3rl.tracking.report import pipeline_report

CPUS_OF_A_JOB = 4
"""Actors of one job: a trainer, a rollout worker, a reward worker, teachers. They take turns on the cores."""


def run_pipeline(job: PipelineJob) -> Path:
    """Returns the pipeline's folder, with ``report.md`` in it. A second call goes on where the first one ended."""
    console = Console(highlight=False, soft_wrap=True)
    store = RunStore.create(Path(job.runs) / job.name, dump_job(job))
    runs: dict[str, Path] = {}
    try:
        with ray_cluster(_enough_cpus(job)):
            _run_all(job, runs, store, lambda text: console.print(text, markup=False))
        report = pipeline_report(store.path, {name: runs[name] for name in job.jobs})
        store.set_status("finished")
        console.print(f"{job.name}: report in {report}", markup=False)
    except BaseException as error:
        store.set_status("failed", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        store.close()
    return store.path


def _run_all(job: PipelineJob, runs: dict[str, Path], store: RunStore, say: Callable[[str], None]) -> None:
    """Fill ``runs``. After a failure nothing new starts; what runs is waited for, then the failure is raised."""
    waiting, order = dict(job.jobs), list(job.jobs)
    running: dict[Future[Path], str] = {}
    failure: BaseException | None = None
    with _executor(job.parallel) as pool:
        while waiting or running:
            ready = [name for name, part in waiting.items() if all(n in runs for n in references(part))]
            for name in ready[: job.parallel - len(running)]:
                part = with_results(waiting.pop(name), runs)
                if done := finished(part, [runs[n] for n in references(job.jobs[name])]):
                    say(f"{name}: done before ({done})")
                    runs[name] = done
                    continue
                say(f"[{order.index(name) + 1}/{len(order)}] {name}: {part.kind}")
                store.set_status("running", job=", ".join([*running.values(), name]))
                running[pool.submit(_start, part)] = name
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                name = running.pop(future)
                if error := future.exception():
                    failure, waiting = failure or error, {}
                else:
                    runs[name] = future.result()
    if failure is not None:
        raise failure


def _start(part: Any) -> Path:
    from k3rl.recipes.run import start

    return start(part)


@contextmanager
def _executor(parallel: int) -> Iterator[Executor]:
    """Threads; for one job at a time the caller's own, so that an interrupt reaches it at once."""
    if parallel == 1:
        yield _Inline()
        return
    import ray

    with ThreadPoolExecutor(parallel, thread_name_prefix="job") as pool:
        try:
            yield pool
        except BaseException:
            ray.shutdown()  # jobs that still run end with an error instead of being waited for
            raise


class _Inline(Executor):
    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


def with_results(job: Any, runs: Mapping[str, Path]) -> Any:
    """The job with every ``@name`` replaced by what that job left: a model's folder, a run, or its problems."""
    job = with_models(job, lambda model: resolved(model, runs))
    job = with_parts(job, RolloutsData, lambda d: d.model_copy(update={"path": _place(d.path, runs)}))
    return with_parts(
        job, JsonlData, lambda d: d.model_copy(update={"path": _place(d.path, runs, "problems.jsonl")})
    )


def _place(path: str, runs: Mapping[str, Path], file: str = "") -> str:
    return str(runs[path[1:]] / file) if path.startswith("@") else path


def finished(job: JobBase, inputs: list[Path]) -> Path | None:
    """The job's folder, where a run with this very config has ended well. A finished run with another config is found
    out about when the job starts.

    Raises `UserError` where one of ``inputs`` (runs' folders) ended after it: it was made from something else.
    """
    path = Path(job.runs) / job.name
    if not (path / "config.yaml").is_file():
        return None
    store = RunStore.open(path)
    same = (path / "config.yaml").read_text(encoding="utf-8") == dump_job(job)
    if not same or store.status().get("state") != "finished":
        return None
    for used in inputs:
        if _ended_s(used) > _ended_s(path):
            raise UserError(f"{path} was made before {used}, which it uses: delete {path} to make it again")
    return path


def _ended_s(run: Path) -> float:
    return (run / "status.json").stat().st_mtime


def _enough_cpus(job: PipelineJob) -> RayConfig:
    """Jobs side by side need actors for each."""
    cpus = max(job.ray.num_cpus or os.cpu_count() or 1, CPUS_OF_A_JOB) * job.parallel
    return job.ray.model_copy(update={"num_cpus": cpus}) if job.parallel > 1 else job.ray
