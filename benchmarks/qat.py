"""What quantisation costs: the quickstart's cold start and RL with QAT from the first step, without, and with weights
quantised only at the end. The held-out reward is that of the model as MXFP4 export would serve it.

    python benchmarks/qat.py --seeds 0 1 2 --out benchmarks/results/qat.cpu.json

K3 quantises routed experts alone: three tenths of this small model's matrices, and rounding them at the end costs
nothing. Wider schemes are ``feedforward`` and ``everything`` (85% of the matrices), each also with activations
in MXFP8. One process a seed and scheme, and one a seed in full precision, whose model is then rounded by each scheme in
turn: that is "at the end". One thread each, ``--jobs`` at a time. Trainer, engine, objective and budgets are those of
`k3rl run`, without Ray and partial rollouts.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

sys.path.append(sys.path.pop(0))  # this folder has a rewards.py too
from harness import Result

from k3rl.algorithms import Algorithm
from k3rl.chat import load_renderer
from k3rl.config.rewards import ReplaceOverBudget
from k3rl.config.trainer import AdamWConfig, ScheduleConfig, TrainerConfig
from k3rl.data.tasks import EFFORTS, keyboard_walk, keyboard_walk_demonstrations
from k3rl.models import ModelConfig
from k3rl.models.base import LanguageModel
from k3rl.quant.config import QatConfig
from k3rl.quant.qat import prepare
from k3rl.trainer import TrainerWorker
from k3rl.types import (
    Author,
    Channel,
    Group,
    Problem,
    Reward,
    Segment,
    Status,
    StopReason,
    Trajectory,
    stream_key,
)
from rewards.budgets import apply_budgets
from rollout.engine import Generation, SamplingParams
from rollout.native import NativeEngine

BUDGETS = ReplaceOverBudget(tau={"default": {"low": 0.75, "high": 1.25, "max": 2.5}})
RENDERER = load_renderer("k3-nano")
TARGETS: dict[str, tuple[str, ...]] = {
    "experts": ("experts",),
    "feedforward": ("experts", "*.mlp.*_proj", "*.shared_experts.*_proj", "*.routed_expert_*_proj"),
}
TARGETS["everything"] = (
    *TARGETS["feedforward"],
    *(f"*.self_attn.{name}" for name in ("[qkvgob]_proj", "f_?_proj", "q_?_proj", "kv_a_proj*")),
)
"""All linear modules but the head and those whose matrices are also read outside a linear map (docs/qat.md)."""


def answers(model: LanguageModel, problems: list[Problem], samples: int, seed: int, draw: int) -> list[Group]:
    """Sampled at temperature 1 and scored, budgets included."""
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    engine = NativeEngine(frozen, max_slots=128, max_context=256, eos_token_ids=RENDERER.stop_token_ids)
    groups = [Group(p, draw + i, []) for i, p in enumerate(problems)]
    waiting: dict[str, tuple[Trajectory, Group]] = {}
    sampling = SamplingParams(max_tokens=96, stop_token_ids=RENDERER.stop_token_ids)
    for group in groups:
        p = group.problem
        ids = RENDERER.encode_prompt(p.messages, (), p.effort)
        for k in range(samples):
            t = Trajectory(p.id, group.draw, k, p.domain, p.effort, ids)
            waiting[t.id] = (t, group)
            engine.submit(
                [
                    Generation(
                        t.id, ids, sampling, stream_key(seed, p.id, group.draw, k), group=str(group.draw)
                    )
                ]
            )
    while engine.pending():
        for g in engine.step():
            t, group = waiting[g.id]
            response = RENDERER.parse(g.token_ids)
            thought = min(len(response.reasoning), len(g.token_ids))  # one character is one token
            cut = [(Channel.THINK, 0, thought), (Channel.RESPONSE, thought, len(g.token_ids))]
            t.segments = [
                Segment(Author.MODEL, c, g.token_ids[a:b], g.logprobs[a:b], 0) for c, a, b in cut if b > a
            ]
            t.status = Status.COMPLETE if g.stop_reason is StopReason.END_OF_TURN else Status.TRUNCATED
            right = response.complete and response.content.strip() == group.problem.reward["answer"]
            t.reward = Reward(float(right))
            group.trajectories.append(t)
    for group in groups:
        group.trajectories.sort(key=lambda t: t.sample)
        rewards = [t.reward for t in group.trajectories if t.reward is not None]
        for t, r in zip(
            group.trajectories,
            apply_budgets(BUDGETS, group.problem, group.trajectories, rewards, 0),
            strict=True,
        ):
            t.reward = r
    return groups


def held_out(model: LanguageModel, limit: int) -> float:
    problems = [replace(p, effort=e) for p in keyboard_walk("held_out")[:limit] for e in EFFORTS]
    answered = [t.reward for g in answers(model, problems, 1, 0, 10**6) for t in g.trajectories]
    totals = [r.total for r in answered if r is not None and r.total is not None]
    return sum(totals) / len(totals)


SCHEMES = {
    name + ("" if activations == "none" else "+" + activations): QatConfig(
        targets=targets, activations=activations
    )
    for name, targets in TARGETS.items()
    for activations in ("none", "mxfp8")
}


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    schemes: list[str]
    sft_steps: int
    sft_lr: float
    rl_steps: int
    rl_lr: float
    limit: int
    overrides: str


def cold_start(shape: ModelConfig, seed: int, settings: Settings, rng: random.Random) -> LanguageModel:
    """Supervised on demonstrations of the walk, 16 a step."""
    steps = settings.sft_steps
    schedule = ScheduleConfig(shape="linear", warmup_steps=20, decay_steps=steps, final_fraction=0.1)
    optimizer = AdamWConfig(lr=settings.sft_lr, weight_decay=0.01)
    worker = TrainerWorker(shape, TrainerConfig(optimizer=optimizer, schedule=schedule), seed=seed)
    demonstrations = keyboard_walk_demonstrations(size=16 * steps)
    rng.shuffle(demonstrations)
    for step in range(steps):
        batch = [
            RENDERER.encode_conversation(c.messages, (), c.effort)
            for c in demonstrations[16 * step : 16 * step + 16]
        ]
        worker.sft_step([(e.ids, e.loss_mask, 1.0) for e in batch])
    return worker.model


def train(form: str, seed: int, settings: Settings) -> dict[str, float]:
    """``form``: full, or the scheme to train in. Held-out reward by what is served, and the seconds taken."""
    torch.set_num_threads(1)
    started, rng = time.monotonic(), random.Random(seed)
    label = form if form == "full" else f"{form}, QAT"
    shape = ModelConfig(qat=SCHEMES.get(form), overrides=json.loads(settings.overrides))
    model = cold_start(shape, seed, settings, rng)
    served = {f"{label}, cold start": held_out(model, settings.limit)}
    optimizer = AdamWConfig(lr=settings.rl_lr)
    config = TrainerConfig(optimizer=optimizer, schedule=ScheduleConfig(warmup_steps=3))
    trainer, algorithm = TrainerWorker(model, config, seed=seed), Algorithm(config.objective)
    problems = keyboard_walk("train")
    rng.shuffle(problems)
    for step in range(settings.rl_steps):
        chosen = [
            replace(p, effort=EFFORTS[i % 3])
            for i, p in enumerate(problems[16 * step : 16 * step + 16], step)
        ]
        trainer.step(algorithm.batch(answers(trainer.model, chosen, 8, seed, 16 * step)).trained)
    served[label] = held_out(trainer.model, settings.limit)
    for scheme in settings.schemes if form == "full" else ():
        rounded = copy.deepcopy(trainer.model)
        prepare(rounded, SCHEMES[scheme])
        served[f"{scheme}, at the end"] = held_out(rounded, settings.limit)
    return served | {f"{label}, seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=["experts", "everything"])
    parser.add_argument("--sft-steps", type=int, default=600)
    parser.add_argument("--sft-lr", type=float, default=3e-3)
    parser.add_argument("--rl-steps", type=int, default=16)
    parser.add_argument("--rl-lr", type=float, default=5e-4)
    parser.add_argument("--limit", type=int, default=150, help="held-out problems, each at three efforts")
    parser.add_argument(
        "--overrides", default="{}", help="fields of k3-nano's architecture to change, as JSON"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("FORM", "SEED"), help="a single run, printed as JSON")
    args = parser.parse_args()
    settings = Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)})
    if args.one:
        print(json.dumps(train(args.one[0], int(args.one[1]), settings)))
        return
    options = ["--schemes", *args.schemes]
    for name in ("sft_steps", "sft_lr", "rl_steps", "rl_lr", "limit", "overrides"):
        options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]

    def run(job: tuple[int, str]) -> tuple[int, dict[str, float]]:
        command = [sys.executable, __file__, "--one", job[1], str(job[0]), *options]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=one_thread, check=True)
        return job[0], json.loads(done.stdout.splitlines()[-1])

    result = Result("qat", "cpu")
    values: dict[str, list[float]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for job in as_completed(
            [pool.submit(run, (seed, form)) for seed in args.seeds for form in ("full", *args.schemes)]
        ):
            seed, served = job.result()
            for form, value in served.items():
                values.setdefault(form, []).append(value)
                unit = "s" if form.endswith("seconds") else "reward"
                result.row(f"{form}, seed {seed}", value, unit)
            result.write(args.out)  # after each: what was measured stays, whatever becomes of the rest
    mean = {form: sum(v) / len(v) for form, v in values.items()}
    for form, value in mean.items():
        if not form.endswith("seconds"):
            peer = "full, cold start" if form.endswith("cold start") else "full"
            result.row(f"{form}, mean of seeds", value, "reward", peer, mean[peer])
    result.write(args.out)


if __name__ == "__main__":
    main()
