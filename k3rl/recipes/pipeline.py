"""Jobs in their order, each started from the artefacts of earlier ones; what is finished and unchanged is skipped."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from k3rl.config.jobs import JobBase, PipelineJob
from k3rl.config.load import dump_job
from k3rl.recipes.journal import resolved
from k3rl.recipes.launch import ray_cluster
from k3rl.recipes.preflight import with_models
from k3rl.store import RunStore
from k3rl.tracking.report import pipeline_report


def run_pipeline(job: PipelineJob) -> Path:
    """Returns the pipeline's folder, with ``report.md`` in it. A second call goes on where the first one ended."""
    from k3rl.recipes.run import start

    console = Console(highlight=False, soft_wrap=True)
    store = RunStore.create(Path(job.runs) / job.name, dump_job(job))
    runs: dict[str, Path] = {}
    try:
        with ray_cluster(job.ray):
            for number, (name, part) in enumerate(job.jobs.items(), 1):
                part = with_models(part, lambda model: resolved(model, runs))
                if done := finished(part):
                    console.print(f"{name}: done before ({done})", markup=False)
                    runs[name] = done
                    continue
                console.print(f"[{number}/{len(job.jobs)}] {name}: {part.kind}", markup=False)
                store.set_status("running", job=name)
                runs[name] = start(part)
        report = pipeline_report(store.path, runs)
        store.set_status("finished")
        console.print(f"{job.name}: report in {report}", markup=False)
    except BaseException as error:
        store.set_status("failed", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        store.close()
    return store.path


def finished(job: JobBase) -> Path | None:
    """The job's folder, where a run with this very config has ended well. A finished run with another config is found
    out about when the job starts."""
    path = Path(job.runs) / job.name
    if not (path / "config.yaml").is_file():
        return None
    store = RunStore.open(path)
    same = (path / "config.yaml").read_text(encoding="utf-8") == dump_job(job)
    return path if same and store.status().get("state") == "finished" else None
