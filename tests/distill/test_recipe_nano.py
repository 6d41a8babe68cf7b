"""The whole nano recipe at the smallest sizes: every job runs on what the jobs before it left, and the report has every
cell of every stage. What it learns is measured by `make recipe`."""

import json

import pytest
import yaml

from k3rl.config.load import validate
from k3rl.recipes.run import run_job

STEPS = {"sft": 4, "consolidate": 2, "mopd": 1, "mix_rl": 1}


def smallest(plain: dict, runs: str) -> dict:
    """The recipe with few steps, problems, samples and tokens."""

    def cut(part):
        if isinstance(part, list):
            return [cut(p) for p in part]
        if not isinstance(part, dict):
            return part
        part = {key: cut(value) for key, value in part.items()}
        limits = {
            "limit": 4,
            "groups": 4,
            "samples": 2,
            "max_tokens": 24,
            "problems": 6,
            "batch_size": 4,
            "size": 16,
        }
        return {key: min(limits[key], value) if key in limits else value for key, value in part.items()}

    jobs = {name: cut(job) for name, job in plain["jobs"].items()}
    for name, job in jobs.items():
        if "steps" in job:
            job["steps"] = STEPS.get(name, 1)
        if "schedule" in job.get("trainer", {}):
            job["trainer"]["schedule"] = {}
    jobs["consolidate"]["data"].pop("min_reward")
    return {**plain, "runs": runs, "jobs": jobs}


@pytest.mark.slow
def test_the_nano_recipe_runs_to_its_report(tmp_path):
    with open("configs/k3_recipe_nano.yaml", encoding="utf-8") as file:
        plain = smallest(yaml.safe_load(file), str(tmp_path))
    run = run_job(validate(plain, {}, "test"))
    report = json.loads((run / "report.json").read_text())
    stages = [
        "sft",
        "off_policy_sft",
        "mopd",
        "mopd_mxfp4",
        "mix_rl",
        "average",
        "task_arithmetic",
        "teachers",
    ]
    cells = {(c["stage"], c["domain"], c["effort"]) for c in report["cells"] if c["stage"] in stages}
    domains, efforts = ("general", "agent", "coding"), ("low", "high", "max")
    assert cells >= {(s, d, e) for s in stages for d in domains for e in efforts}
    by_stage = {s: [c for c in report["jobs"]["evaluate"]["cells"] if c["stage"] == s] for s in stages}
    # Trained for MXFP4: the exported student is the trained one.
    assert by_stage["mopd"] == [
        {**c, "stage": "mopd", "tokens_per_s": mine["tokens_per_s"]}
        for c, mine in zip(by_stage["mopd_mxfp4"], by_stage["mopd"], strict=True)
    ]
    metrics = [json.loads(line) for line in (run / "mopd/metrics.jsonl").read_text().splitlines()]
    taught = {
        name.removeprefix("teacher/kl/teacher/") for m in metrics for name in m if "kl/teacher/" in name
    }
    assert len(taught) >= 3
