"""The viewer on a run of 1,000,000 rollouts, one of them of 100,000 tokens: how long a person waits, and its memory.

    python benchmarks/viewer.py --out benchmarks/results/viewer.cpu.json

The run is made up column by column with numpy: 1,000 steps of 125 groups of 8, texts of 10 to 60 words, 16 tokens each
with all per-token columns, in the store's own schema, row groups, encoding and file names. The real command serves it
from a process of its own; every number is what an HTTP client sees, the median of five where a question can be asked
again. Memory is the kernel's peak of the server's resident set (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import Result

from k3rl.chat import load_renderer
from k3rl.store import ROLLOUT_SCHEMA
from k3rl.store.run import GROUP_ROWS, PARQUET

ROWS_A_STEP, SAMPLES, TOKENS = 1000, 8, 16
LONG = 100_000
DOMAINS, EFFORTS = ("maths", "code", "agent", "words", "science"), ("low", "high", "max")
SAID = """so we take the sum and carry one then check it again which gives a number that is smaller than before hence
answer let me think about this case first because every other one follows from it by symmetry or else fails at once"""
WORDS = np.array(SAID.split())
NEEDLE = "quartz"
"""In about one text of a thousand."""


def write_step(folder: Path, step: int, rng: np.random.Generator, vocabulary: np.ndarray) -> None:
    """One file of the run, as `RunStore.write_rollouts` would write it."""
    n = ROWS_A_STEP
    group = np.arange(n) // SAMPLES
    domain, effort = group % len(DOMAINS), (group // len(DOMAINS)) % len(EFFORTS)
    right = rng.random(n) < np.clip(0.2 + 0.0006 * step + 0.2 * rng.random(n // SAMPLES)[group], 0, 0.95)
    length = np.where(rng.random(n) < 0.1, -0.2, 0.0)
    reward = np.where(rng.random(n) < 0.01, np.nan, right + length)
    thinking = rng.lognormal(5, 0.6, n).astype(np.int32)
    texts = sentences(n, rng)
    asked = rng.integers(0, 10**6, n)
    problem = (step * (n // SAMPLES) + np.arange(n // SAMPLES)) % 5000
    mean = np.nanmean(reward.reshape(-1, SAMPLES), axis=1)[group]
    columns = {
        "step": np.full(n, step),
        "problem_id": words([f"p-{p:05d}" for p in problem], group),
        "draw": step * (n // SAMPLES) + group,
        "sample": np.arange(n) % SAMPLES,
        "domain": words(DOMAINS, domain),
        "effort": words(EFFORTS, effort),
        "status": words(("complete", "truncated"), (rng.random(n) < 0.05).astype(int)),
        "stop_reason": words(("end_of_turn", "max_tokens"), (rng.random(n) < 0.05).astype(int)),
        "error": words(("",), np.zeros(n, int)),
        "fate": words(("trained", "dropped:zero_variance"), (rng.random(n) < 0.2).astype(int)),
        "reward": pa.array(reward, from_pandas=True),
        "reward_outcome": words(("scored", "judge_failed"), np.isnan(reward).astype(int)),
        "reward_components": components(right, length),
        "reward_explanation": words(
            ("exact: not equal to the answer", "exact: equal to the answer"), right.astype(int)
        ),
        "advantage": pa.array(reward - mean, from_pandas=True),
        "prompt_text": pa.array([f"<|user|>What is {a} + 1?" for a in asked]),
        "response_text": texts,
        "reasoning": texts,
        "content": pa.array([str(x) for x in rng.integers(0, 10**6, n)]),
        "messages_json": pa.array([f'[{{"role": "user", "content": "What is {a} + 1?"}}]' for a in asked]),
        "prompt_ids": pa.array([vocabulary[:TOKENS]] * n),
        **token_columns(np.full(n, TOKENS), rng, vocabulary, step),
        "policy_version": np.full(n, step),
        "started_step": np.full(n, step) - (rng.random(n) < 0.1),
        "finished_step": np.full(n, step),
        "staleness_mean": rng.random(n),
        "staleness_max": rng.poisson(0.3, n),
        "thinking_tokens": thinking,
        "sampled_tokens": thinking + 40,
        "budget_tokens": np.full(n, 300),
        "reference_length": np.full(n, 150),
        "turns": np.where(domain == 2, 3, 1),
        "timings_json": words(('{"queued": 0.1, "decode": 2.0}',), np.zeros(n, int)),
        "judge_trace_json": pa.nulls(n, pa.string()),
        "sandbox_json": pa.nulls(n, pa.string()),
    }
    write(folder, step, columns)


def write_long(folder: Path, step: int, rng: np.random.Generator, vocabulary: np.ndarray) -> None:
    """A last step with one rollout of 100,000 tokens."""
    text = " ".join(rng.choice(WORDS, LONG))
    values: dict[str, Any] = {f.name: pa.nulls(1, f.type) for f in ROLLOUT_SCHEMA}
    values |= {n: pa.array([text]) for n in ("response_text", "reasoning", "content")}
    values |= {"step": [step], "problem_id": ["long"], "draw": [10**9], "sample": [0], "status": ["complete"]}
    values |= {
        "reward": [1.0],
        "sampled_tokens": [LONG],
        "turns": [1],
        "domain": ["maths"],
        "effort": ["max"],
    }
    write(folder, step, values | token_columns(np.array([LONG]), rng, vocabulary, step))


def write(folder: Path, step: int, columns: dict[str, Any]) -> None:
    arrays = [pa.array(columns[f.name]).cast(f.type) for f in ROLLOUT_SCHEMA]
    table = pa.table(arrays, schema=ROLLOUT_SCHEMA)
    pq.write_table(table, folder / f"step-{step:06d}.parquet", row_group_size=GROUP_ROWS, **PARQUET)


def sentences(n: int, rng: np.random.Generator) -> pa.Array:
    lengths = rng.integers(10, 60, n)
    flat = rng.choice(WORDS, lengths.sum())
    flat[rng.integers(0, len(flat), n // 1000)] = NEEDLE
    ends = np.cumsum(lengths)
    return pa.array([" ".join(flat[e - k : e]) for e, k in zip(ends, lengths, strict=True)])


def words(values: Any, chosen: np.ndarray) -> pa.Array:
    return pa.DictionaryArray.from_arrays(
        pa.array(chosen, pa.int32()), pa.array(list(values))
    ).dictionary_decode()


def components(right: np.ndarray, length: np.ndarray) -> pa.Array:
    n = len(right)
    values = np.stack([right.astype(float), length], axis=1).ravel()
    names = words(("task", "length"), np.tile([0, 1], n))
    pairs = pa.StructArray.from_arrays([names, pa.array(values)], ["name", "value"])
    return pa.ListArray.from_arrays(pa.array(np.arange(n + 1) * 2, pa.int32()), pairs)


def token_columns(
    lengths: np.ndarray, rng: np.random.Generator, vocabulary: np.ndarray, step: int
) -> dict[str, pa.Array]:
    total = int(lengths.sum())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    logprobs = -rng.exponential(0.4, total).astype(np.float32)

    def listed(values: Any) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, values if isinstance(values, pa.Array) else pa.array(values))

    return {
        "response_ids": listed(rng.choice(vocabulary, total)),
        "sampled_mask": listed(np.ones(total, bool)),
        "channels": listed(words(("think", "response"), (np.arange(total) % TOKENS > 12).astype(int))),
        "logprobs": listed(logprobs),
        "policy_versions": listed(np.full(total, step, np.int32)),
        "trainer_logprobs": listed((logprobs + rng.normal(0, 0.02, total)).astype(np.float32)),
        "teacher_logprobs": listed((logprobs + rng.normal(0.1, 0.3, total)).astype(np.float32)),
        "token_advantages": listed(rng.normal(0, 1, total).astype(np.float32)),
    }


def whole_tokens() -> np.ndarray:
    """Ids of k3-nano whose text is whole characters, as in English; others take several to one."""
    renderer = load_renderer("k3-nano")
    found = [i for i in range(renderer.vocab_size) if "\ufffd" not in renderer.decode([i])]
    return np.array(found, np.int32)


class Server:
    """`k3rl view` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "k3rl.cli", "view", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline() if self.process.stdout else ""
        if "http://" not in line:
            raise SystemExit(f"the viewer did not start: {line}")
        self.address = line.split("k3rl view: ")[1].split()[0]

    def ask(self, path: str, **parameters: Any) -> tuple[dict[str, Any], float]:
        """The answer, and the seconds until all of it is here and parsed."""
        began = time.perf_counter()
        query = urllib.parse.urlencode(parameters, doseq=True)
        with urllib.request.urlopen(f"{self.address}/api/{path}?{query}", timeout=300) as reply:
            answer = json.loads(reply.read())
        return answer, time.perf_counter() - began

    def median(self, path: str, **parameters: Any) -> float:
        return statistics.median(self.ask(path, **parameters)[1] for _ in range(5))

    def peak_gib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def measure(folder: Path, steps: int, result: Result) -> None:
    began = time.perf_counter()
    server = Server(folder)
    try:
        while not server.ask("rollouts")[0]["rows"]:
            time.sleep(0.05)
        result.row("command to the first page of rows, newest step first", time.perf_counter() - began, "s")
        while (reading := server.ask("state")[0]["reading"])["done"] < reading["total"] or not reading[
            "total"
        ]:
            time.sleep(0.5)
        result.row("command to all rollouts in the table, meanwhile usable", time.perf_counter() - began, "s")
        result.row("page of 100 while columns from tokens are computed", server.median("rollouts"), "s")
        while server.ask("state")[0]["reading"]["derived"] < reading["total"]:
            time.sleep(1)
        result.row("command to the columns that need all tokens", time.perf_counter() - began, "s")
        questions(server, steps, result)
        result.row("peak memory of the server", server.peak_gib(), "GiB")
    finally:
        server.close()


def questions(server: Server, steps: int, result: Result) -> None:
    run = server.ask("state")[0]["runs"][0]["name"]
    total = server.ask("rollouts")[0]["total"]
    result.row("rollouts", total, "rows")
    result.row("first page", server.median("rollouts"), "s")
    picked = {"filter": 'reward < 0.5 and domain = "maths" and effort = max', "sort": "sampled_tokens"}
    result.row("filter by three columns, sort by a fourth", server.median("rollouts", **picked), "s")
    picked = {"filter": "component.length < 0 and logprob_gap_max > 0.02", "sort": "teacher_kl"}
    result.row(
        "filter by a reward part and a token column, sort by another",
        server.median("rollouts", **picked),
        "s",
    )
    result.row("page 5,000 of all", server.median("rollouts", offset=total // 2), "s")
    result.row("one step's rollouts", server.median("rollouts", filter=f"step = {steps // 2}"), "s")
    search(server, result)
    long = {"run": run, "step": steps, "draw": 10**9, "sample": 0}
    result.row("one rollout of 100,000 tokens, all columns", server.median("rollout", **long), "s")
    near = {"of_run": run, "step": steps // 2, "draw": steps // 2 * (ROWS_A_STEP // SAMPLES), "sample": 3}
    result.row("its neighbours in a sorted million", server.median("neighbours", **near, sort="reward"), "s")
    result.row("table of domain and effort, one step", server.median("cells", run=run), "s")
    result.row("table of domain and effort, whole run", server.median("cells", run=run, whole="true"), "s")
    result.row("ten degeneracies of the whole run", server.median("degeneracies", run=run), "s")
    result.row("curves from all rollouts by domain", server.median("steps", run=run, by="domain"), "s")
    result.row("problems that changed most", server.median("compare/problems", run=run), "s")
    result.row("state, asked every second", server.median("state"), "s")


def search(server: Server, result: Result) -> None:
    """The first answer comes with what was found by then; asking again goes on."""
    began = time.perf_counter()
    answer, first = server.ask("rollouts", filter=f'"{NEEDLE}"')
    result.row("full-text search over all texts, first page of hits", first, "s")
    while answer["searching"]["done"] < answer["searching"]["total"]:
        answer, _ = server.ask("rollouts", filter=f'"{NEEDLE}"')
    result.row("full-text search over all texts, to the last file", time.perf_counter() - began, "s")
    result.row("the same search again", server.median("rollouts", filter=f'"{NEEDLE}"'), "s")
    one = server.median("rollouts", filter='step >= 990 and "symmetry or else"')
    result.row("full-text search in the last ten steps", one, "s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="of 1,000 rollouts each")
    parser.add_argument("--data", type=Path, help="keep the made-up run here, and use it where it is there")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.data or Path(tempfile.mkdtemp(prefix="k3rl-million-"))
    try:
        if not (folder / "config.yaml").exists():
            make(folder, arguments.steps)
        result = Result("viewer", "cpu")
        size = sum(f.stat().st_size for f in folder.rglob("*.parquet"))
        result.row("parquet on disk", size / 2**30, "GiB")
        measure(folder, arguments.steps, result)
        result.write(arguments.out)
    finally:
        if arguments.data is None:
            shutil.rmtree(folder)


def make(folder: Path, steps: int) -> None:
    (folder / "rollouts").mkdir(parents=True)
    rng, vocabulary = np.random.default_rng(0), whole_tokens()
    for step in range(steps):
        write_step(folder / "rollouts", step, rng, vocabulary)
    write_long(folder / "rollouts", steps, rng, vocabulary)
    (folder / "config.yaml").write_text("kind: rl\nmodel: {path: k3-nano}\n")


if __name__ == "__main__":
    main()
