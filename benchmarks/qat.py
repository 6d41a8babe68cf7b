"""What quantisation costs: the quickstart's cold start and RL with QAT from the first step, without, and with weights
quantised only at the end. The held-out reward is that of the model as MXFP4 export would serve it.

    python benchmarks/qat.py --seeds 0 1 2 --out benchmarks/results/qat.cpu.json

One process a seed and form, each on one thread. Trainer, engine, objective and budgets are those of `k3rl run`, without
Ray and partial rollouts.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import subprocess
import sys
from dataclasses import replace
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

BUDGETS = ReplaceOverBudget(tau={"default": {"low": 0.75, "high": 1.25, "max": 2.5}})  # type: ignore[arg-type]
RENDERER = load_renderer("k3-nano")


def answers(
    model: torch.nn.Module, problems: list[Problem], samples: int, seed: int, draw: int
) -> list[Group]:
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


def held_out(model: torch.nn.Module, limit: int) -> float:
    problems = [replace(p, effort=e) for p in keyboard_walk("held_out")[:limit] for e in EFFORTS]
    totals = [
        t.reward.total for g in answers(model, problems, 1, 0, 10**6) for t in g.trajectories if t.reward
    ]
    return sum(totals) / len(totals)


def train(form: str, seed: int, sft_steps: int, rl_steps: int, limit: int) -> dict[str, float]:
    """Held-out reward by what is served."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    shape = ModelConfig(qat=QatConfig() if form == "qat" else None)
    schedule = ScheduleConfig(shape="linear", warmup_steps=20, decay_steps=sft_steps, final_fraction=0.1)
    worker = TrainerWorker(
        shape, TrainerConfig(optimizer=AdamWConfig(lr=3e-3, weight_decay=0.01), schedule=schedule), seed=seed
    )
    demonstrations = keyboard_walk_demonstrations(size=16 * sft_steps)
    rng.shuffle(demonstrations)
    for step in range(sft_steps):
        batch = [
            RENDERER.encode_conversation(c.messages, (), c.effort)
            for c in demonstrations[16 * step : 16 * step + 16]
        ]
        worker.sft_step([(e.ids, e.loss_mask, 1.0) for e in batch])
    config = TrainerConfig(optimizer=AdamWConfig(lr=5e-4), schedule=ScheduleConfig(warmup_steps=3))
    trainer, algorithm = TrainerWorker(worker.model, config, seed=seed), Algorithm(config.objective)
    problems = keyboard_walk("train")
    rng.shuffle(problems)
    for step in range(rl_steps):
        chosen = [
            replace(p, effort=EFFORTS[i % 3])
            for i, p in enumerate(problems[16 * step : 16 * step + 16], step)
        ]
        trainer.step(algorithm.batch(answers(trainer.model, chosen, 8, seed, 16 * step)).trained)
    served = {form: held_out(trainer.model, limit)}
    if form == "full":
        prepare(trainer.model, QatConfig())
        served["quantised at the end"] = held_out(trainer.model, limit)
    return served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--sft-steps", type=int, default=600)
    parser.add_argument("--rl-steps", type=int, default=16)
    parser.add_argument("--limit", type=int, default=150)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("FORM", "SEED"), help="a single run, printed as JSON")
    args = parser.parse_args()
    if args.one:
        form, seed = args.one
        print(json.dumps(train(form, int(seed), args.sft_steps, args.rl_steps, args.limit)))
        return
    sizes = ["--sft-steps", str(args.sft_steps), "--rl-steps", str(args.rl_steps), "--limit", str(args.limit)]
    runs = {
        (form, seed): subprocess.Popen(
            [sys.executable, __file__, "--one", form, str(seed), *sizes], stdout=subprocess.PIPE, text=True
        )
        for form in ("full", "qat")
        for seed in args.seeds
    }
    result, means = Result("qat", "cpu"), {}
    for (_, seed), process in runs.items():
        output, _ = process.communicate()
        for form, reward in json.loads(output.splitlines()[-1]).items():
            result.row(f"held-out reward, {form}, seed {seed}", reward, "reward")
            means.setdefault(form, []).append(reward)
    mean = {form: sum(v) / len(v) for form, v in means.items()}
    for form, value in mean.items():
        result.row(f"held-out reward, {form}, mean of seeds", value, "reward", "full precision", mean["full"])
    result.write(args.out)


if __name__ == "__main__":
    main()
