"""Jobs around distillation: merges are the formula's, collected rollouts are trained on token by token, scores are
normalised as defined, a pipeline runs what it must and nothing twice."""

import itertools
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from k3rl.chat import load_renderer
from k3rl.config.distill import RolloutsData
from k3rl.config.jobs import MergeJob, references
from k3rl.config.load import load_job, validate
from k3rl.errors import UserError
from k3rl.models import ModelConfig, build_model, load_model, save_model
from k3rl.recipes.collect import Rollouts
from k3rl.recipes.evaluate import pass_at
from k3rl.recipes.merge import merge
from k3rl.recipes.run import run_job
from k3rl.store import RunStore, rollout_row
from k3rl.tracking.report import evaluation_section, normalised, normalised_summary
from k3rl.types import Author, Channel, Effort, Problem, Reward, Segment, Status, Trajectory

NANO = ModelConfig(overrides={"num_hidden_layers": 2, "attn_res_block_size": 1})
TOKENIZER = "k3rl/chat/nano"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed in range(3):
        save_model(build_model(NANO, seed=seed), folder / str(seed), TOKENIZER)
    return [str(folder / str(seed)) for seed in range(3)]


def tensors(folder) -> dict[str, np.ndarray]:
    return {k: v.double().numpy() for k, v in load_file(f"{folder}/model.safetensors").items()}


def test_a_merge_is_the_formula(models, tmp_path):
    base, a, b = (tensors(m) for m in models)
    names = [ModelConfig(path=m) for m in models]
    cases = {
        "average": ({"models": tuple(names[1:])}, lambda n: (a[n] + b[n]) / 2),
        "weighted": (
            {"models": tuple(names[1:]), "weights": (3.0, 1.0)},
            lambda n: 0.75 * a[n] + 0.25 * b[n],
        ),
        "arithmetic": (
            {"models": tuple(names[1:]), "method": "task_arithmetic", "base": names[0], "scale": 0.4},
            lambda n: base[n] + 0.4 * (a[n] - base[n] + b[n] - base[n]),
        ),
    }
    for name, (fields, expected) in cases.items():
        merge(MergeJob(name=name, **fields), tmp_path / name)
        for tensor, value in tensors(tmp_path / name).items():
            np.testing.assert_allclose(value, expected(tensor), rtol=1e-6, atol=1e-7)
        load_model(ModelConfig(path=str(tmp_path / name)))
        assert load_renderer(str(tmp_path / name)).fingerprint() == load_renderer("k3-nano").fingerprint()


def test_models_of_two_architectures_are_not_merged(models, tmp_path):
    save_model(build_model(ModelConfig(overrides={"num_hidden_layers": 3}), seed=0), tmp_path / "deep")
    job = MergeJob(name="m", models=(ModelConfig(path=models[0]), ModelConfig(path=str(tmp_path / "deep"))))
    with pytest.raises(UserError, match="absent.*models of one architecture"):
        merge(job, tmp_path / "merged")


def trajectory(sample: int, reward: float, effort: Effort, status: Status) -> Trajectory:
    t = Trajectory("p", 0, sample, "general", effort, [5, 6, 7], status=status, reward=Reward(reward))
    t.segments = [
        Segment(Author.MODEL, Channel.THINK, [10 + sample, 11], [-1.0, -2.0], 0),
        Segment(Author.ENVIRONMENT, Channel.OBSERVATION, [20, 21, 22]),
        Segment(Author.MODEL, Channel.RESPONSE, [30], [-0.5], 0),
    ]
    return t


def test_collected_rollouts_are_imitated_as_sampled_and_observations_carry_no_loss(tmp_path):
    renderer, problem = (
        load_renderer("k3-nano"),
        Problem("p", "general", [{"role": "user", "content": "x"}], {}),
    )
    made = [
        trajectory(0, 1.0, Effort.LOW, Status.COMPLETE),
        trajectory(1, -1.0, Effort.LOW, Status.COMPLETE),
        trajectory(2, 1.0, Effort.MAX, Status.COMPLETE),
        trajectory(3, 1.0, Effort.LOW, Status.TRUNCATED),
    ]
    store = RunStore.create(tmp_path / "run", "kind: collect\n")
    rows = [
        rollout_row(t, problem, "collected", step=0, version=0, renderer=renderer, thinking=True)
        for t in made
    ]
    store.write_rollouts(0, rows)
    path = str(tmp_path / "run")
    kept = [Rollouts(RolloutsData(path=path, **c)) for c in ({}, {"min_reward": 0.5}, {"efforts": ("max",)})]
    assert [[s.ids[3] for s in found.sequences] for found in kept] == [[10, 11, 12], [10, 12], [12]]
    assert list(kept[0][0].ids) == [5, 6, 7, 10, 11, 20, 21, 22, 30]
    assert list(kept[0][0].loss_mask) == [False] * 3 + [True] * 2 + [False] * 3 + [True]
    assert len({found.fingerprint() for found in kept}) == 3
    with pytest.raises(UserError, match="no trajectory of .* meets"):
        Rollouts(RolloutsData(path=path, min_reward=2))


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    rng = random.Random(7)
    for _ in range(20):
        solved = [rng.random() < 0.4 for _ in range(rng.randint(1, 7))]
        for k in range(1, len(solved) + 1):
            draws = list(itertools.combinations(solved, k))
            assert pass_at(solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_normalised_scores():
    values = {"sft": (0.2, 0.5, 0.30), "teachers": (0.7, 1.0, 0.31), "mopd": (0.6, 1.0, 0.9)}
    cells = [
        {
            "stage": s,
            "domain": "d",
            "effort": e,
            "reward": v,
            "accuracy": v,
            "pass_at_k": v,
            "k": 16,
            "n": 1,
            "tokens_per_s": 1.0,
        }
        for s, row in values.items()
        for e, v in zip(("low", "high", "max"), row, strict=True)
    ]
    between = ("sft", "teachers", 0.05)
    assert normalised(cells, "mopd", between, "reward") == pytest.approx(
        {("d", "low"): 0.8, ("d", "high"): 1}
    )
    assert set(normalised(cells, "sft", between, "reward").values()) == {0}
    assert set(normalised(cells, "teachers", between, "reward").values()) == {1}
    numbers = normalised_summary(cells, list(values), between)["reward"]["mopd"]
    assert numbers == pytest.approx({"mean": 0.9, "lowest": 0.8, "highest": 1.0, "cells": 2})
    text = evaluation_section(cells, list(values), between)
    assert "| d | low | 0.000 | 1.000 | 0.800 |" in text
    assert "### pass@16\n" in text
    assert "| lowest |  | 0.000 | 1.000 | 0.800 |" in text


def pipeline(models, runs, **changes):
    jobs = {
        "a": {"kind": "merge", "models": [{"path": models[0]}, {"path": models[1]}]},
        "b": {"kind": "merge", "models": [{"path": models[1]}, {"path": models[2]}]},
        "c": {"kind": "merge", "models": [{"path": "@a"}, {"path": "@b"}]},
        "d": {"kind": "export", "model": {"path": "@c"}},
    }
    plain = {
        "kind": "pipeline",
        "name": "pipe",
        "runs": str(runs),
        "parallel": 2,
        "jobs": {**jobs, **changes},
    }
    return validate(plain, {}, "test")


def test_a_pipeline_runs_in_order_skips_what_is_done_and_notices_what_is_older(models, tmp_path, capsys):
    run_job(pipeline(models, tmp_path))
    first = capsys.readouterr().out
    assert first.index("c: merge") > max(first.index("step 1/1  average"), first.index("b: merge"))
    merged = tensors(tmp_path / "pipe/c/checkpoints/step-000000/trainer/model")
    parts = [tensors(m) for m in models]
    for name, value in merged.items():
        expected = (parts[0][name] + 2 * parts[1][name] + parts[2][name]) / 4
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    packed = load_model(ModelConfig(path=str(tmp_path / "pipe/d/checkpoints/step-000000/trainer/model")))
    assert any(torch.is_floating_point(t) for _, t in packed.named_weights())
    run_job(pipeline(models, tmp_path))
    assert capsys.readouterr().out.count("done before") == 4
    later = time.time() + 5
    os.utime(tmp_path / "pipe/b/status.json", (later, later))
    with pytest.raises(UserError, match=r"pipe/c was made before .*pipe/b, which it uses: delete"):
        run_job(pipeline(models, tmp_path))


def test_references_are_found_in_teachers_data_and_merges():
    job = load_job("configs/k3_recipe_nano.yaml")
    assert references(job.jobs["mopd"])[0] == "consolidate"
    assert {"general_max", "coding_low", "general_budgets"} <= set(references(job.jobs["mopd"]))
    assert references(job.jobs["task_arithmetic"])[0] == "general_max"
    plain = yaml.safe_load(Path("configs/k3_recipe_nano.yaml").read_text())
    plain["jobs"]["consolidate"]["data"]["path"] = "@colect"
    with pytest.raises(UserError, match="'consolidate' uses '@colect'.*did you mean 'collect'"):
        validate(plain, {}, "test")
