"""From a job to its recipe. `run_job` is what `k3rl run` does; `check_job` what `k3rl config check` does."""

from __future__ import annotations

from pathlib import Path

from k3rl.config.jobs import (
    BudgetsJob,
    CollectJob,
    DistillJob,
    EvaluateJob,
    ExportJob,
    Job,
    MergeJob,
    PipelineJob,
    RlJob,
    SftJob,
)
from k3rl.recipes.journal import latest_model, resolved
from k3rl.recipes.preflight import check_job, with_models

__all__ = ["check_job", "latest_model", "run_job"]


def run_job(job: Job) -> Path:
    """Check the job, run it to its end, return its folder. Resumes what an earlier process left.

    Raises `UserError` before anything expensive starts, `RunError` where the run breaks.
    """
    job = with_models(job, resolved)
    check_job(job)
    return start(job)


def start(job: Job) -> Path:
    """The recipe alone, of a job that has been checked."""
    match job:
        case PipelineJob():
            from k3rl.recipes.pipeline import run_pipeline

            return run_pipeline(job)
        case SftJob():
            from k3rl.recipes.sft import run_sft

            return run_sft(job)
        case DistillJob():
            from k3rl.recipes.distill import run_distill

            return run_distill(job)
        case RlJob():
            from k3rl.recipes.rl import run_rl

            return run_rl(job)
        case BudgetsJob():
            from k3rl.recipes.budgets import run_budgets

            return run_budgets(job)
        case EvaluateJob():
            from k3rl.recipes.evaluate import run_evaluate

            return run_evaluate(job)
        case CollectJob():
            from k3rl.recipes.collect import run_collect

            return run_collect(job)
        case MergeJob():
            from k3rl.recipes.merge import run_merge

            return run_merge(job)
        case ExportJob():
            from k3rl.recipes.merge import run_export

            return run_export(job)
