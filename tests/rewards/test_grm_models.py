"""Models as judges, in whole runs: one on the run's own native engine, one behind vLLM's server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import httpx
import pyarrow.parquet as pq
import pytest
import yaml

from k3rl.chat import load_renderer
from k3rl.config.load import load_job, validate
from k3rl.errors import UserError
from k3rl.recipes.run import run_job

NAMES = {"type": "callable", "function": "k3rl.data.names:invented_names"}


def config(folder, judge, **rewards):
    return {
        "kind": "rl",
        "name": "judged",
        "runs": str(folder),
        "model": {"path": "k3-nano"},
        "data": NAMES,
        "steps": 2,
        "thinking": False,
        "rollout": {
            "groups": 2, "samples": 2, "max_context": 96, "max_tokens": 8,
            "engine": {"type": "native", "max_slots": 6},
        },
        "rewards": {
            "parts": [{"reward": "grm", "arguments": {"judge": judge, "tournament": "all_pairs"}}],
            **rewards,
        },
    }  # fmt: skip


def rows_of(run):
    return [row for path in sorted(run.glob("rollouts/*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_a_judge_on_an_engine_of_the_run_that_knows_no_protocol_scores_nothing(tmp_path):
    """Weights at random call no tools: every judgement is void. Groups wait, are dropped, and the run goes on."""
    judges = {"own": {"model": {"path": "k3-nano"}, "max_context": 3072, "engine": {"max_slots": 8}}}
    judge = {"type": "engine", "name": "own", "max_tokens": 16, "max_turns": 6}
    plain = config(tmp_path, judge, judges=judges, on_error="defer_group", deferrals=1, retries=0)
    run = run_job(validate(plain, {}, "test"))
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    ledger = json.loads((run / "ledger.json").read_text())
    rows = rows_of(run)
    assert rows, "what waited longest was dropped, with its reason"
    renderer = load_renderer("k3-nano")  # the job does not think, so neither do its rollouts
    for row in rows:
        asked = [{"role": "user", "content": row["problem_id"].removeprefix("name-")}]
        assert row["prompt_ids"] == renderer.encode_prompt(asked, thinking=False)
    assert {row["reward"] for row in rows} == {None}
    assert {row["fate"] for row in rows} == {"dropped:reward:judge_failed"}
    assert all("judgements are void" in row["reward_explanation"] for row in rows)
    assert ledger["trained"] == 0
    assert ledger["next_draw"] == sum(ledger["dropped"].values()) + len(ledger["open"])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["rewards/deferred"] > 0


@pytest.mark.parametrize(
    ("judge", "says"),
    [
        ({"type": "engine", "name": "nobody"}, "wants the judge 'nobody'"),
        ({"type": "oracle"}, "no type 'oracle'"),
        ({"type": "rule", "function": "rewards.grm.rules:nothing"}, "nothing"),
        ({"type": "endpoint", "url": "http://127.0.0.1:9/v1"}, "model"),
    ],
)
def test_a_judge_that_cannot_work_is_an_error_before_the_run(tmp_path, judge, says):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path / "runs", judge)))
    with pytest.raises(UserError, match=says):
        run_job(load_job(file))
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def vllm_server():
    pytest.importorskip("vllm")
    from k3rl.models.smollm2 import smollm2_folder

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_folder()),
        "--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
        "--max-model-len", "4096", "--enforce-eager",
    ]  # fmt: skip
    server = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert server.poll() is None, f"the server ended with {server.returncode}"
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield f"{url}/v1"
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_the_names_run_with_a_model_behind_vllm(tmp_path, vllm_server):
    """The guarded job of configs/grm_nano.yaml, small: SmolLM2, led through the protocol, judges every pair twice."""
    with open("configs/grm_nano.yaml", encoding="utf-8") as file:
        job = yaml.safe_load(file)["jobs"]["guarded"]
    judge = {
        "type": "endpoint", "url": vllm_server, "model": "judge", "steer": True, "max_tokens": 300,
        "timeout_s": 300, "judgement_timeout_s": 600, "concurrency": 8,
    }  # fmt: skip
    job["model"] = {"path": "k3-nano"}
    job["rollout"] |= {
        "groups": 2,
        "samples": 3,
        "max_tokens": 12,
        "engine": {"type": "native", "max_slots": 6},
    }
    job["rewards"]["parts"][0]["arguments"] |= {"judge": judge, "tournament": "all_pairs"}
    job |= {"steps": 2, "name": "judged", "runs": str(tmp_path)}
    run = run_job(validate(job, {}, "test"))
    scored = [row for row in rows_of(run) if row["reward"] is not None]
    assert scored, [row["reward_explanation"] for row in rows_of(run)]
    trace = json.loads(scored[0]["judge_trace_json"])
    judgements = trace["grm"]["judgements"] if "grm" in trace else trace["judgements"]
    whole = [j for j in judgements if j["stage"] == "recorded"]
    assert whole
    for judgement in whole:
        steps = [s["tool"] for s in judgement["steps"] if s["accepted"]]
        assert steps == ["read_candidate"] * 2 + ["write_rubric"] + ["score_candidate"] * 2 + ["record"]
        assert judgement["tokens"] > 100
