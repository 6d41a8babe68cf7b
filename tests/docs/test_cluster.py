"""Several nodes: the cluster files are sound, the Slurm script makes a cluster, a node that dies does not end a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from k3rl.config.load import load_job

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "configs" / "cluster"
BIN = Path(sys.executable).parent
SHORT = [
    "jobs.sft.steps=40",
    "jobs.sft.trainer.schedule.decay_steps=40",
    "jobs.evaluate.evaluation.data.limit=4",
]


def test_the_cluster_config_is_the_quickstart_over_nodes():
    job = load_job(CLUSTER / "quickstart.yaml")
    assert job.jobs["rl"].ray.address == "auto"
    assert job.jobs["rl"].rollout.workers == 2
    assert job.jobs["rl"].steps == load_job(ROOT / "configs" / "quickstart.yaml").jobs["rl"].steps


def test_the_rayjob_runs_our_command_with_a_token_and_a_shared_folder():
    job = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    command = job["spec"]["entrypoint"].split()
    assert command[:2] == ["k3rl", "run"]
    load_job(ROOT / Path(command[2]).relative_to("/k3rl"), command[3:])
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        volumes = {v["name"] for v in group["template"]["spec"]["volumes"]}
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert set(mounts) == volumes
        assert mounts["runs"] == "/runs"


def test_the_slurm_script_parses():
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], check=True)


SRUN = """#!/usr/bin/env bash
# Of srun, as much as the script uses, with this machine as every node.
while [[ ${1:-} == --* ]]; do shift; done
if [[ $1 == hostname ]]; then echo 127.0.0.1; else exec "$@"; fi
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_slurm_script_starts_a_cluster_and_runs_a_job_on_it(tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "scontrol").write_text("#!/usr/bin/env bash\necho one; echo two\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "[one-two]"}
    environment |= {"SLURM_CPUS_ON_NODE": "4", "K3RL_BIN": str(BIN), "RAY_PORT": "6411"}
    config = CLUSTER / "quickstart.yaml"
    command = [CLUSTER / "slurm.sbatch", config, f"runs={tmp_path}", "jobs.rl.steps=1", *SHORT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "quickstart-cluster" / "report.json").read_text())
    assert {c["stage"] for c in report["cells"]} == {"sft", "rl"}
    assert not subprocess.run(["pgrep", "-f", "gcs_server.*6411"], capture_output=True).stdout


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    cluster.second = cluster.add_node(num_cpus=4)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def rollout_actors_on(cluster: Any) -> int:
    """How many live rollout workers the second node has, by the cluster's own book."""
    program = (
        "import ray, sys; from ray._private.state import actors\n"
        "ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)\n"
        "print(sum(a['State'] == 'ALIVE' and a['ActorClassName'] == 'Actor'"
        " and a['Address']['NodeID'] == sys.argv[2] for a in actors().values()))"
    )
    command = [sys.executable, "-c", program, cluster.address, cluster.second.node_id]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_dies_in_mid_run_and_the_run_goes_on(two_nodes: Any, tmp_path: Path):
    """The quickstart across two raylets; SIGKILL to everything of the second, while it generates."""
    steps = 10
    config, address = CLUSTER / "quickstart.yaml", f"ray.address={two_nodes.address}"
    command = [BIN / "k3rl", "run", config, address, f"runs={tmp_path}", f"jobs.rl.steps={steps}", *SHORT]
    run = tmp_path / "quickstart-cluster" / "rl"
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: lines(run) >= 3, process, tmp_path / "said")
            assert rollout_actors_on(two_nodes) == 1
            assert lines(run) < steps - 2, "the run was too fast for this test"
            two_nodes.remove_node(two_nodes.second, allow_graceful=False)
            at = lines(run)
            assert process.wait(600) == 0, (tmp_path / "said").read_text()
        finally:
            process.kill()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(steps))
    assert metrics[at]["rollout/worker_faults"] + metrics[-1]["rollout/worker_faults"] >= 1
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["steps_done"]) == ("finished", steps)
    rows = trained_rows(run)
    assert len(rows) == len(set(rows)) == sum(m["batch/trained"] + m["batch/dropped"] for m in metrics)


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(reached: Any, process: subprocess.Popen[bytes], said: Path) -> None:
    limit = time.monotonic() + 600
    while not reached():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < limit, said.read_text()
        time.sleep(0.2)


def trained_rows(run: Path) -> list[tuple[int, int]]:
    import pyarrow.parquet as pq

    found = [pq.read_table(f, columns=["draw", "sample"]).to_pylist() for f in sorted(run.glob("rollouts/*"))]
    return [(r["draw"], r["sample"]) for part in found for r in part]
