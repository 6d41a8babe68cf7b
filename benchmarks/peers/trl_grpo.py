"""The same GRPO run on TRL and on k3rl: SmolLM2-135M, prompts, group size, lengths, optimiser and rewards alike.

    pip install -e '.[peers,smollm2]'
    python benchmarks/peers/trl_grpo.py --out benchmarks/results/trl_grpo.cpu.json
    python benchmarks/peers/trl_grpo.py --device cuda --dtype bfloat16 --prompts 32 \\
        --out benchmarks/results/trl_grpo.h200.json

One after the other in processes of their own, TRL with transformers' generate (no vLLM), k3rl with its native engine.
TRL's gradient checkpointing is off: nothing is recomputed on either side. A step is generation, rewards, update and,
for k3rl, publication; writing checkpoints is left out on both. Memory is the peak of the proportional set size of all
processes.
Responses differ, so speeds are per trained token. The first step, warm-up, is not counted. ``--model FOLDER`` takes
another Hugging Face model; where the folder has a config and a tokenizer alone, its weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]
SYSTEM = "You solve sums. Reply with the final number only."
OPTIMIZER = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8}
MODEL = "smollm2-135m-instruct"


def problems(count: int) -> list[dict[str, Any]]:
    """Sums of one-digit numbers, as messages; the same for both sides."""
    rng, out = random.Random(0), []
    for i in range(count):
        a, b = rng.randrange(10), rng.randrange(10)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {a} + {b}?"}]
        out.append({"id": f"sum-{i}", "messages": messages, "answer": str(a + b)})
    return out


# -- TRL -----------------------------------------------------------------------------------------------------


def run_trl(args: argparse.Namespace, data: Path, to: Path) -> None:
    """Writes {seconds, tokens, reward} of every step."""
    import torch
    from datasets import Dataset
    from last_number import value
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from k3rl.models.smollm2 import smollm2_folder

    folder, steps = Path(args.model) if args.model else smollm2_folder(), []
    rows = [json.loads(line) for line in data.read_text().splitlines()]

    def score(completions: Any, answer: list[str], completion_ids: Any, **_: Any) -> list[float]:
        steps.append({"tokens": sum(map(len, completion_ids)), "began": began[0]})
        values = [value(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]
        steps[-1]["reward"] = fmean(values)
        return values

    began = [0.0]

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began[0] = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps[-1]["seconds"] = time.monotonic() - began[0]

    config = GRPOConfig(
        output_dir=str(to.parent / "trl"), use_cpu=args.device == "cpu", bf16=False, report_to="none",
        per_device_train_batch_size=args.prompts * args.samples, num_generations=args.samples,
        max_completion_length=args.tokens, temperature=1.0, beta=0.0, num_iterations=1, loss_type="grpo",
        learning_rate=OPTIMIZER["lr"], adam_beta1=OPTIMIZER["betas"][0], adam_beta2=OPTIMIZER["betas"][1],
        adam_epsilon=OPTIMIZER["eps"], weight_decay=0.0, max_grad_norm=1.0, lr_scheduler_type="constant",
        gradient_checkpointing=False, max_steps=args.steps, logging_steps=1, save_strategy="no", seed=0,
        disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list([{"prompt": r["messages"], "answer": r["answer"]} for r in rows]),
        callbacks=[Timer()],
    )
    trainer.train()
    facts: dict[str, Any] = {"steps": steps}
    if torch.cuda.is_available() and args.device == "cuda":
        facts["gpu_bytes"] = torch.cuda.max_memory_allocated()
    to.write_text(json.dumps(facts))


# -- k3rl ----------------------------------------------------------------------------------------------------


def run_k3rl(args: argparse.Namespace, data: Path, to: Path) -> None:
    """The job as a person would write it, by `k3rl run`."""
    from k3rl.cli import main

    job = {
        "kind": "rl", "name": "k3rl", "runs": str(to.parent), "device": args.device, "thinking": False,
        "model": {"path": args.model or MODEL, "dtype": args.dtype},
        "data": {"type": "jsonl", "path": str(data), "reward": "exact"},
        "steps": args.steps, "checkpoint_every": args.steps,
        "rollout": {
            "groups": args.prompts, "samples": args.samples, "lambda": 1.0, "max_context": 512,
            "max_tokens": args.tokens,
            "engine": {"type": "native", "max_slots": args.prompts * args.samples},
        },
        "rewards": {"parts": [{"reward": f"{HERE / 'last_number.py'}:last_number"}]},
        "trainer": {
            "objective": {"type": "grpo"},
            "optimizer": {"type": "adamw", **OPTIMIZER, "betas": list(OPTIMIZER["betas"])},
            "micro_batch_tokens": 4096,
            "threads": os.cpu_count(),  # as torch takes outside of Ray
        },
    }  # fmt: skip
    config = to.parent / "job.yaml"
    config.write_text(json.dumps(job))
    sys.argv = ["k3rl", "run", str(config)]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    rows = [json.loads(line) for line in (to.parent / "k3rl" / "metrics.jsonl").read_text().splitlines()]
    steps = [
        {
            "seconds": r["time/step_s"] - r.get("time/checkpoint_s", 0.0),
            "tokens": r["train/trained_tokens"],
            "reward": r["reward/mean"],
            "rollout": r["time/rollout_s"],
            "train": r["time/train_s"],
        }
        for r in rows
    ]
    facts: dict[str, Any] = {"steps": steps}
    if args.device == "cuda":
        facts["gpu_bytes"] = max(r["train/peak_memory_bytes"] for r in rows)
    to.write_text(json.dumps(facts))


# -- both ----------------------------------------------------------------------------------------------------


class Memory(threading.Thread):
    """Peak proportional set size of a process and all below it: shared pages count once."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root, self.peak_bytes, self.over = root, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(2.0):
            self.peak_bytes = max(self.peak_bytes, sum(map(pss_bytes, descendants(self.root))))


def descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):  # it ended meanwhile
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        found.append(queue.pop())
        queue += parents.get(found[-1], [])
    return found


def pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it ended meanwhile
        return 0
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def measure(side: str, args: argparse.Namespace, folder: Path, data: Path) -> dict[str, Any]:
    """Run one side in a process of its own."""
    to = folder / side / "facts.json"
    to.parent.mkdir()
    command = [sys.executable, __file__, "--side", side, "--data", str(data), "--to", str(to)]
    for name in ("device", "dtype", "prompts", "samples", "tokens", "steps", "model"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name}", str(value)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    memory = Memory(process.pid)
    memory.start()
    if process.wait():
        raise SystemExit(f"{side} failed")
    memory.over.set()
    facts = json.loads(to.read_text())
    print(f"{side}: {json.dumps(facts['steps'])}", file=sys.stderr, flush=True)
    return {**facts, "peak_bytes": memory.peak_bytes}


def with_weights(args: argparse.Namespace, folder: Path) -> str:
    """A copy of ``args.model`` with random weights of seed 0."""
    from k3rl.models import ModelConfig, build_model, save_model

    model = build_model(ModelConfig(path=args.model, dtype=args.dtype), seed=0)
    save_model(model, folder, args.model)
    return str(folder)


def rate(facts: dict[str, Any]) -> float:
    """Trained tokens per second after the first step."""
    counted = facts["steps"][1:]
    return sum(s["tokens"] for s in counted) / sum(s["seconds"] for s in counted)


def to_reward(facts: dict[str, Any], target: float) -> float | None:
    """Seconds until the mean of three steps' rewards is at the target; the first step counts here."""
    spent, last = 0.0, []
    for step in facts["steps"]:
        spent += step["seconds"]
        last = [*last, step["reward"]][-3:]
        if len(last) == 3 and fmean(last) >= target:
            return spent
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", help="folder; SmolLM2-135M-Instruct if not given")
    parser.add_argument("--prompts", type=int, default=2, help="in a step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="at most, in a response")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.0, help="mean reward to measure the time to")
    parser.add_argument("--side", choices=["trl", "k3rl"], help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        {"trl": run_trl, "k3rl": run_k3rl}[args.side](args, args.data, args.to)
        return

    from harness import Result

    machine = args.out.name.split(".")[1] if args.out else args.device
    result = Result("trl_grpo", machine)
    with tempfile.TemporaryDirectory() as name:
        what = "SmolLM2-135M"
        if args.model:
            what = Path(args.model).name
            if not any(Path(args.model).glob("*.safetensors")):
                what, args.model = f"{what} (random weights)", with_weights(args, Path(name) / "model")
        data = Path(name) / "problems.jsonl"
        data.write_text("\n".join(map(json.dumps, problems(args.prompts * args.steps))) + "\n")
        ours, theirs = (measure(side, args, Path(name), data) for side in ("k3rl", "trl"))
    peer = "TRL, transformers generate"
    label = f"{what} {args.dtype}, {args.prompts} x {args.samples} responses of at most {args.tokens} tokens"
    result.row(f"{label}: trained tokens", rate(ours), "tokens/s", peer, rate(theirs))
    seconds = [median(s["seconds"] for s in f["steps"][1:]) for f in (ours, theirs)]
    result.row(f"{label}: a step", seconds[0], "s", peer, seconds[1])
    result.row(f"{label}: tokens of a step", *mean_tokens(ours, theirs, peer))
    result.row(
        f"{label}: peak memory, all processes",
        ours["peak_bytes"] / 2**30,
        "GiB",
        peer,
        theirs["peak_bytes"] / 2**30,
    )
    if "gpu_bytes" in ours and "gpu_bytes" in theirs:
        result.row(
            f"{label}: peak GPU memory of training",
            ours["gpu_bytes"] / 2**30,
            "GiB",
            peer,
            theirs["gpu_bytes"] / 2**30,
        )
    if args.target and (mine := to_reward(ours, args.target)):
        result.row(f"{label}: to reward {args.target}", mine, "s", peer, to_reward(theirs, args.target))
    result.write(args.out)


def mean_tokens(ours: dict[str, Any], theirs: dict[str, Any], peer: str) -> tuple[float, str, str, float]:
    mine, other = (fmean(s["tokens"] for s in f["steps"][1:]) for f in (ours, theirs))
    return mine, "tokens", peer, other


if __name__ == "__main__":
    main()
