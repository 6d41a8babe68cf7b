"""Math verdicts per second of processor time: in killable processes, beside math-verify called in this process.

    python benchmarks/rewards.py --groups 250

Both judge the same random answers, each text once, in groups of eight trajectories of 512 tokens. What isolation alone
costs is the same verifier in this process and in its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder: the file is called like the package that it measures

from k3rl.types import Author, Channel, ParsedResponse, Problem, Segment, Status, Trajectory
from rewards.api import Scored
from rewards.isolation.pool import IsolatedPool
from rewards.registry import get_reward

GROUP, TOKENS = 8, 512


@dataclass(frozen=True)
class Case:
    """One problem's gold answer and its group's responses."""

    gold: str
    group: list[Scored]


def random_answers(rng: random.Random) -> tuple[str, list[str], list[bool]]:
    """A gold answer; a group of others' as a policy may write them; and which of them are right."""
    a, b, c = (rng.randrange(2, 10_000) for _ in range(3))
    rights = [rng.random() < 0.5 for _ in range(GROUP)]
    values = [c if right else c + rng.randrange(1, 50) for right in rights]
    gold, write = rng.choice(
        [
            (f"{c}", lambda d: f"{d:,}"),
            (rf"\frac{{{a}}}{{{c}}}", lambda d: f"{a}/{d}"),
            (rf"{a}\sqrt{{{c}}}", lambda d: rf"{a} \cdot \sqrt{{{d}}}"),
            (f"{a}.{c:04d}", lambda d: f"{a}.{d:04d}"),
            (f"({a}, {c})", lambda d: rf"\left({a},\, {d}\right)"),
            (f"{a}x^2 + {b}x + {c}", lambda d: f"{d} + {b}x + {a}x^2"),
            (rf"\{{{a}, {b}, {c}\}}", lambda d: rf"\{{{d}, {a}, {b}\}}"),
            (rf"\frac{{{a}\pi}}{{{c}}}", lambda d: rf"\dfrac{{{a}\pi}}{{{d}}}"),
        ]
    )
    return gold, [write(d) for d in values], rights


def make_cases(groups: int, seed: int) -> tuple[list[Case], list[bool]]:
    rng, cases, rights = random.Random(seed), [], []
    for number in range(groups):
        gold, answers, right = random_answers(rng)
        problem = Problem(f"p{number}", "general", [{"role": "user", "content": "?"}], {"name": "math"})
        group = []
        for sample, answer in enumerate(answers):
            content = (
                f"After {number} steps the {sample} pieces fit. The final answer is $\\boxed{{{answer}}}$."
            )
            segment = Segment(Author.MODEL, Channel.RESPONSE, [7] * TOKENS, [-0.5] * TOKENS, 0)
            trajectory = Trajectory(
                problem.id, number, sample, "general", None, [1] * 64, [segment], Status.COMPLETE
            )
            group.append(Scored(problem, ParsedResponse("", content), trajectory))
        cases.append(Case(gold, group))
        rights += right
    return cases, rights


def cpu_of(pid: int) -> float:
    """Processor seconds of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def by_math_verify(cases: Sequence[Case]) -> list[bool]:
    """Without its time limits, so that it pays for verdicts alone; each gold answer is read once."""
    from math_verify import parse, verify

    verdicts = []
    for case in cases:
        gold = parse(f"${case.gold}$", parsing_timeout=None)
        for scored in case.group:
            answer = parse(scored.content, parsing_timeout=None)
            verdicts.append(bool(verify(gold, answer, timeout_seconds=None)))
    return verdicts


def by_ours_here(cases: Sequence[Case]) -> list[bool]:
    from rewards.verifiers.math import judge

    return [judge(case.gold, scored.content)[1] for case in cases for scored in case.group]


def timed(
    call: Callable[[], list[bool]], processes: Callable[[], list[int]]
) -> tuple[list[bool], float, float]:
    """Verdicts, processor seconds of the processes, wall seconds."""
    before, began = {pid: cpu_of(pid) for pid in processes()}, time.perf_counter()
    verdicts = call()
    wall_s = time.perf_counter() - began
    return verdicts, sum(cpu_of(pid) - before.get(pid, 0.0) for pid in processes()), wall_s


def isolated(cases: Sequence[Case], warm: Sequence[Case]) -> tuple[list[bool], float, float]:
    """Group by group through a pool of one process, as the reward workers do it."""
    reward, pool = get_reward("math"), IsolatedPool(processes=1)
    pool.preload("rewards.verifiers.math")

    def run(some: Sequence[Case]) -> list[bool]:
        found = [v for case in some for v in pool.run(reward, case.group, {"answer": case.gold}, 10.0)]
        return [v.score is not None and v.score.value == 1.0 for v in found]

    try:
        run(warm)
        return timed(lambda: run(cases), lambda: [os.getpid(), *(child.pid for child in pool.free)])
    finally:
        pool.close()


def measure(groups: int, seed: int) -> list[dict[str, Any]]:
    logging.disable(logging.WARNING)
    warm, _ = make_cases(16, seed + 1)
    cases, rights = make_cases(groups, seed)
    count = len(rights)
    by_math_verify(warm), by_ours_here(warm)
    here = [os.getpid()]
    peer, peer_cpu_s, peer_wall_s = timed(lambda: by_math_verify(cases), lambda: here)
    ours, ours_cpu_s, ours_wall_s = isolated(cases, warm)
    same, same_cpu_s, _ = timed(lambda: by_ours_here(cases), lambda: here)
    assert ours == same, "isolation changed a verdict"

    def right(verdicts: list[bool]) -> float:
        return sum(v == r for v, r in zip(verdicts, rights, strict=True)) / count

    name, own = "math-verify in process", "the same verifier in process"
    numbers = [
        ("isolated math verdicts per second of processor time", count / ours_cpu_s, name, count / peer_cpu_s),
        ("isolated math verdicts per second, one process", count / ours_wall_s, name, count / peer_wall_s),
        ("isolated math verdicts per second of processor time", count / ours_cpu_s, own, count / same_cpu_s),
        ("share of right verdicts", right(ours), name, right(peer)),
    ]
    return [
        {
            "metric": metric,
            "value": round(value, 4),
            "unit": "share" if metric.startswith("share") else "1/s",
            "peer": peer_name,
            "peer_value": round(peer_value, 4),
            "ratio": round(value / peer_value, 3),
        }
        for metric, value, peer_name, peer_value in numbers
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "rewards.cpu.json")
    options = parser.parse_args()
    rows = measure(options.groups, options.seed)
    packages = {name: version(name) for name in ("math-verify", "sympy")}
    result = {
        "name": "rewards",
        "machine": "cpu",
        "versions": {"python": platform.python_version(), **packages, "cores": os.cpu_count()},
        "command": shlex.join(["python", "benchmarks/rewards.py", *sys.argv[1:]]),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['metric']:54} {row['value']:10.2f} {row['unit']:6} {row['ratio']:6.2f}x of '{row['peer']}'"
        )


if __name__ == "__main__":
    main()
