"""Reports: their numbers are those of the cells and the metrics, their plots show something."""

import json
import random

import matplotlib.image
import pytest

from k3rl.store import RunStore
from k3rl.tracking.plots import training_plots
from k3rl.tracking.report import evaluation_report, pipeline_report, training_report


def cells(rng: random.Random, stages: list[str]) -> list[dict]:
    return [
        {
            "stage": stage, "domain": domain, "effort": effort, "reward": rng.uniform(-1, 1), "accuracy": rng.random(),
            "thinking_tokens": rng.uniform(0, 99), "total_tokens": rng.uniform(99, 200), "tokens_per_s": 10.0,
            "n": rng.randint(1, 9),
        }
        for stage in stages for domain in ("coding", "agent") for effort in ("max", "low", "high")
    ]  # fmt: skip


def table_of(report: str, title: str) -> list[list[str]]:
    lines = report.split(f"### {title}\n\n")[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def metrics(steps: int) -> list[dict]:
    rng = random.Random(1)
    return [
        {
            "step": i, "reward/mean": i / steps, "reward/mean/effort/low": rng.random(), "length/thinking": 3.0 * i,
            "staleness/mean": 0.5, "staleness/max": 2.0, "time/train_s": 1.0, "time/rollout_s": 2.0, "time/step_s": 3.0,
        }
        for i in range(steps)
    ]  # fmt: skip


def test_tables_hold_the_cells_and_means_are_weighted_by_their_size(tmp_path):
    store = RunStore.create(tmp_path / "run", "kind: evaluate\n")
    data = cells(random.Random(0), ["before", "after"])
    report = evaluation_report(store, data, ["before", "after"]).read_text()
    table = table_of(report, "reward")
    assert table[0] == ["domain", "effort", "before", "after"]
    assert [row[:2] for row in table[2:-1]] == [
        [d, e] for d in ("agent", "coding") for e in ("low", "high", "max")
    ]
    for domain, effort, *values in table[2:-1]:
        for stage, value in zip(("before", "after"), values, strict=True):
            (cell,) = [c for c in data if (c["domain"], c["effort"], c["stage"]) == (domain, effort, stage)]
            assert value == f"{cell['reward']:.3f}"
    means = []
    for stage in ("before", "after"):
        own = [c for c in data if c["stage"] == stage]
        means.append(sum(c["reward"] * c["n"] for c in own) / sum(c["n"] for c in own))
    assert table[-1] == ["all", "", *(f"{m:.3f}" for m in means)]
    stored = json.loads((tmp_path / "run" / "report.json").read_text())
    assert stored["gain"] == pytest.approx(means[1] - means[0])


def test_cells_without_a_number_are_dashes(tmp_path):
    store = RunStore.create(tmp_path / "run", "kind: evaluate\n")
    data = [{**c, "reward": None} for c in cells(random.Random(0), ["only"])]
    report = evaluation_report(store, data, ["only"]).read_text()
    assert {row[2] for row in table_of(report, "reward")[2:]} == {"-"}


def test_plots_are_written_for_what_was_measured_and_are_not_blank(tmp_path):
    written = training_plots(metrics(12), tmp_path, "rl")
    assert [p.name for p in written] == [
        "rl-reward.png",
        "rl-lengths.png",
        "rl-staleness.png",
        "rl-phases.png",
    ]
    for path in written:
        pixels = matplotlib.image.imread(path)
        assert pixels.shape[0] > 300
        assert (pixels[..., :3].std(axis=2) > 0.1).sum() > 200, f"{path.name} has no coloured line"
    assert training_plots([], tmp_path, "none") == []
    assert training_plots(metrics(1), tmp_path, "one")


def test_a_pipelines_report_gathers_its_jobs(tmp_path):
    RunStore.create(tmp_path / "pipe", "kind: pipeline\n").close()
    training = RunStore.create(tmp_path / "pipe" / "rl", "kind: rl\n")
    for m in metrics(3):
        training.log_metrics(m.pop("step"), m)
    evaluation = RunStore.create(tmp_path / "pipe" / "evaluate", "kind: evaluate\n")
    evaluation_report(evaluation, cells(random.Random(0), ["sft", "rl"]), ["sft", "rl"])
    runs = {"rl": tmp_path / "pipe" / "rl", "evaluate": tmp_path / "pipe" / "evaluate"}
    report = pipeline_report(tmp_path / "pipe", runs)
    text = report.read_text()
    assert text.index("## evaluate") < text.index("## rl")
    assert "rl, 3 steps, 9 s." in text
    stored = json.loads((tmp_path / "pipe" / "report.json").read_text())
    assert stored["phases"]["rl"] == {"rollout": 6.0, "step": 9.0, "train": 3.0}
    assert len(stored["cells"]) == 12
    for line in text.splitlines():
        if line.startswith("!["):
            assert (report.parent / line.split("(")[1].rstrip(")")).is_file()


def test_a_training_jobs_report_holds_its_last_steps_cells(tmp_path):
    store = RunStore.create(tmp_path / "rl", "kind: rl\n")
    rng, rows = random.Random(2), []
    for step in range(2):
        rows = [
            {
                "step": step,
                "domain": "general",
                "effort": rng.choice(["low", "max"]),
                "reward": rng.choice([0.0, 1.0, None]),
                "thinking_tokens": rng.randint(0, 9),
                "sampled_tokens": rng.randint(9, 20),
            }
            for _ in range(40)
        ]
        store.write_rollouts(step, rows)
        store.log_metrics(step, {"time/step_s": 2.0, "reward/mean": 0.5})
    text = training_report(store).read_text()
    assert text.startswith("# rl\n")
    assert "rl, 2 steps, 4 s." in text
    stored = json.loads((tmp_path / "rl" / "report.json").read_text())
    assert (stored["kind"], stored["phases"]) == ("rl", {"step": 4.0})
    assert [c["effort"] for c in stored["cells"]] == ["low", "max"]
    for cell in stored["cells"]:
        own = [r for r in rows if r["effort"] == cell["effort"] and r["reward"] is not None]
        assert cell["n"] == len(own)
        for name, value in (
            ("reward", sum(r["reward"] for r in own)),
            ("thinking_tokens", sum(r["thinking_tokens"] for r in own)),
            ("total_tokens", sum(r["sampled_tokens"] for r in own)),
        ):
            assert cell[name] * len(own) == pytest.approx(value)
