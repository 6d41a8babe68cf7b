"""Workers that die: nothing is lost, nothing is twice, and every token is the one it would have been."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import Draws, by_id, config, make_worker, problem, run_step

from k3rl.errors import RunError
from k3rl.types import Status, StopReason
from rollout.pool import RolloutPool
from rollout.transport import InlineTransport, WorkerDied

POISON = 13


class FaultyTransport(InlineTransport):
    """Kills workers at random: before a call is done, or after it, so that what it did is lost with its answer."""

    def __init__(
        self, make_worker: Any, rng: random.Random, share: float, methods: tuple[str, ...] = ()
    ) -> None:
        super().__init__(make_worker)
        self.rng, self.share, self.methods, self.deaths = rng, share, methods, 0

    def _do(self, index: int, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        hit = self.rng.random() < self.share and (not self.methods or method in self.methods)
        if hit and self.rng.random() < 0.5:
            self.kill(index)
        outcome = super()._do(index, method, arguments)
        if hit and outcome[0]:
            self.kill(index)
            outcome = False, WorkerDied(f"killed after {method}")
        self.deaths += hit
        return outcome


def faulty_pool(settings, rng: random.Random, share: float, methods=(), **engine: Any) -> RolloutPool:
    def make(index: int):
        return make_worker(settings, index, **engine)

    return RolloutPool(settings, make, run_seed=7, transport=FaultyTransport(make, rng, share, methods))


def trained(settings, share: float, seed: int, steps: int = 8, methods=(), **engine: Any):
    pool, draws, found = faulty_pool(settings, random.Random(seed), share, methods, **engine), Draws(), {}
    for step in range(steps):
        for id_, row in by_id(run_step(pool, step, draws)).items():
            assert id_ not in found, f"{id_} came twice"
            found[id_] = row
        pool.controller.check()
    done = {int(i.split(".")[0]) for i in found}
    assert done | pool.controller.scheduler.open_draws() == set(range(pool.next_draw)), "a draw was lost"
    return found, pool.fleet.transport.deaths


@pytest.mark.parametrize("lambda_", [0.5, 1.0])
def test_random_deaths_change_no_token(lambda_):
    settings = config(
        groups=4,
        samples=3,
        workers=3,
        slice_s=1e-6,
        max_retries=50,
        max_worker_faults=10_000,
        **{"lambda": lambda_},
    )
    seed = random.randrange(2**32)
    print("seed", seed)
    reference, _ = trained(settings, 0.0, seed)
    deaths = 0
    for share in (0.02, 0.1, 0.3):
        found, killed = trained(settings, share, seed)
        deaths += killed
        common = set(reference) & set(found)
        assert len(common) > 0.7 * len(reference)
        assert all(reference[i] == found[i] for i in common)
    print("deaths", deaths)
    assert deaths > 100


@pytest.mark.parametrize("method", ["pause", "load_weights", "sleep", "wake", "hello", "score", "advance"])
def test_deaths_within_each_kind_of_call_change_no_token(method):
    from test_pool import publication

    settings = config(workers=3, slice_s=1e-6, max_retries=50, max_worker_faults=10_000, **{"lambda": 0.5})
    seed = random.randrange(2**32)
    print("seed", seed)
    rows: list[dict] = []
    for share in (0.0, 0.4):
        methods = ("hello", "advance") if method == "hello" else (method,)
        pool, draws, found = faulty_pool(settings, random.Random(seed), share, methods), Draws(), {}
        for step in range(8):
            found |= by_id(run_step(pool, step, draws))
            pool.sleep(1)
            pool.wake()
            acks = pool.publish(publication(step + 1))
            assert [a.version for a in acks] == [step + 1] * 3
            assert pool.score([[5, 6, 7]] * 4, [1] * 4) == [[-6.0, -0.0]] * 4
        rows.append(found)
        assert (pool.fleet.transport.deaths > 0) is (share > 0)
    common = set(rows[0]) & set(rows[1])
    assert len(common) > 20
    assert all(rows[0][i] == rows[1][i] for i in common)


def test_a_trajectory_that_kills_its_worker_fails_alone():
    """One problem brings down the process before it yields a token; the rest of the run is whole."""
    settings = config(groups=4, samples=2, workers=2, max_retries=3, slice_s=1e-6, **{"lambda": 1.0})

    def script(generation: Any) -> None:
        if generation.group == "2":
            raise MemoryError("poison")

    pool = faulty_pool(settings, random.Random(0), 0.0, script=script)
    groups = {g.draw: g for g in run_step(pool, 0, Draws())}
    assert set(groups) == {0, 1, 2, 3}
    for draw, group in groups.items():
        for t in group.trajectories:
            if draw == 2:
                assert (t.status, t.stop_reason) == (Status.FAILED, StopReason.ERROR)
                assert "died 3 times" in t.error
            else:
                assert t.status is Status.COMPLETE, (t.id, t.error)


def test_workers_that_never_come_up_stop_the_run_with_the_reason():
    settings = config(workers=1, max_worker_faults=5)
    pool = faulty_pool(settings, random.Random(0), 1.0, methods=("hello",))
    with pytest.raises(
        RunError, match=r"6 workers died and nothing finished between; last: it died during its start"
    ):
        run_step(pool, 0, Draws())


def test_a_checkpoint_taken_between_deaths_is_whole():
    settings = config(workers=2, slice_s=1e-6, max_retries=50, **{"lambda": 0.5})
    reference, _ = trained(settings, 0.0, 1)
    pool, draws, found = faulty_pool(settings, random.Random(1), 0.1), Draws(), {}
    for step in range(8):
        found |= by_id(run_step(pool, step, draws))
        state = json.loads(json.dumps(pool.state_dict()))
        pool = faulty_pool(settings, random.Random(step), 0.1)
        pool.load_state_dict(state)
        draws = Draws(first=pool.next_draw)
    common = set(reference) & set(found)
    assert len(common) > 30
    assert all(reference[i] == found[i] for i in common)


# -- real processes -------------------------------------------------------------------------------------


def slow_worker(settings, index: int):
    """Half a millisecond a step, so that kills hit something."""
    return make_worker(settings, index, on_step=lambda: time.sleep(0.0005), longest=400)


class SigkillPool(RolloutPool):
    """Sends signals to its workers at random moments, from within its own loop."""

    rng: random.Random | None = None
    kills = 0
    limit = 0
    signal = signal.SIGKILL

    def _turn(self, wait_s: float) -> None:
        if self.rng is not None and self.kills < self.limit and self.rng.random() < 0.25:
            index = self.rng.randrange(self.config.workers)
            process_id = self.fleet.transport.process_id(index)
            if process_id is not None and self.fleet.members[index].ready:
                os.kill(process_id, self.signal)
                self.kills += 1
        super()._turn(min(wait_s, 0.05))


def ray_settings(**fields: Any):
    return config(groups=6, samples=4, workers=2, slice_s=0.01, max_tokens=400, max_retries=50, **fields)


def ray_run(settings, steps: int, rng: random.Random | None = None, limit: int = 0):
    # A worker's process unpickles the factory by name: it must find this file and its helpers.
    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}}
    options = {"num_cpus": 0.5, "runtime_env": here}
    pool = SigkillPool(settings, functools.partial(slow_worker, settings), run_seed=7, actor_options=options)
    draws, found = Draws(), {}
    try:
        pool.rng, pool.limit = rng, limit
        for step in range(steps):
            found |= by_id(run_step(pool, step, draws))
            pool.controller.check()
    finally:
        pool.close()
    return found, pool


def test_sigkilled_ray_workers_change_no_token(ray_session):
    seed = random.randrange(2**32)
    print("seed", seed)
    settings = ray_settings(**{"lambda": 0.75})
    steps = 6  # a busy machine takes few turns a step, and each is a moment to kill in
    reference, _ = ray_run(settings, steps)
    found, pool = ray_run(settings, steps, random.Random(seed), limit=5)
    assert pool.kills >= 3
    assert pool.controller.counts["worker_faults"] >= 3
    common = set(reference) & set(found)
    assert len(common) > 0.6 * len(reference)
    assert all(reference[i] == found[i] for i in common)


@pytest.mark.slow
def test_fifty_sigkills_change_no_token(ray_session):
    settings = ray_settings(**{"lambda": 0.75})
    reference, _ = ray_run(settings, 20)
    found, pool = ray_run(settings, 20, random.Random(0), limit=50)
    assert pool.kills == 50
    common = set(reference) & set(found)
    assert len(common) > 0.8 * len(reference)
    assert all(reference[i] == found[i] for i in common)


def test_a_stopped_worker_is_noticed_and_replaced(ray_session):
    """SIGSTOP: the process is there and does not answer. Its deadline passes, it is killed, its work goes on."""
    settings = ray_settings(**{"lambda": 1.0}, call_timeout_s=3.0)
    SigkillPool.signal = signal.SIGSTOP
    try:
        found, pool = ray_run(settings, 1, random.Random(3), limit=1)
    finally:
        SigkillPool.signal = signal.SIGKILL
    assert pool.kills == 1
    assert pool.controller.counts["worker_faults"] == 1
    assert len(found) == 24
    assert all(problem(int(i.split(".")[0])) for i in found)
