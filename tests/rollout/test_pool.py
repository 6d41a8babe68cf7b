"""The pool with workers in its own process: steps, checkpoints, staleness, routing, asynchronous modes, overhead."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter

import pytest
from rollout_helpers import Draws, by_id, config, inline_pool, make_worker, problem, run_step
from scripted_engine import FIRST_ORDINARY, hashed_length, logprob_at, token_at

from k3rl.errors import RunError
from k3rl.types import Author, Group, Status, StopReason, stream_key
from k3rl.weights import Publisher, make_transport
from rollout.controller import Controller
from rollout.pool import Progress
from rollout.record import Sampled
from rollout.worker import Orders

END = 1


def publication(version: int):
    import torch

    transport = make_transport("shm", put=lambda x: x)
    return Publisher(transport).publish([("w", torch.full((4,), float(version)))], version)


def expected_tokens(t, run_seed: int, end_id: int, longest: int = 60) -> list[int]:
    """What the scripted engine writes for a trajectory, computed apart from all machinery."""
    key = stream_key(run_seed, t.problem_id, t.draw, t.sample)
    length = hashed_length(key, longest)
    return [token_at(key, i) for i in range(length - 1)] + [end_id]


def test_every_group_is_whole_and_every_token_is_the_one_of_its_stream():
    settings = config(workers=2)
    pool, draws = inline_pool(settings), Draws()
    end_id = make_worker(settings, 0).engine.end_id
    seen = []
    for step in range(8):
        for group in run_step(pool, step, draws):
            seen.append(group.draw)
            assert [t.sample for t in group.trajectories] == [0, 1, 2]
            for t in group.trajectories:
                assert t.token_ids == expected_tokens(t, 7, end_id)
                key = stream_key(7, t.problem_id, t.draw, t.sample)
                assert t.logprobs == [logprob_at(key, i) for i in range(len(t.token_ids))]
                assert (t.status, t.stop_reason) == (Status.COMPLETE, StopReason.END_OF_TURN)
                assert t.started_step <= t.finished_step <= step
    assert len(set(seen)) == len(seen)
    assert set(seen) | pool.controller.scheduler.open_draws() == set(range(pool.next_draw))


def test_paused_trajectories_go_on_where_they_stopped_under_the_new_version():
    settings = config(groups=2, samples=4, **{"lambda": 0.5}, slice_s=1e-6, workers=1)
    pool, draws = inline_pool(settings, max_slots=8), Draws()
    spans: Counter[int] = Counter()
    for step in range(12):
        for group in run_step(pool, step, draws):
            for t in group.trajectories:
                versions = t.policy_versions
                assert versions == sorted(versions)
                assert len(versions) == t.sampled_tokens
                spans[len(set(versions))] += 1
                segments = [(s.channel, s.policy_version) for s in t.segments]
                assert len(set(segments)) == len(
                    segments
                )  # cut where channel or version changes, nowhere else
        pool.publish(publication(step + 1))
    assert any(n > 1 for n in spans), "no trajectory ever spanned two versions: the test shows nothing"


def test_a_checkpoint_after_any_step_continues_to_the_same_trajectories():
    settings = config(groups=3, samples=3, slice_s=1e-6, **{"lambda": 0.6}, workers=2)
    whole, draws = inline_pool(settings), Draws()
    reference = {}
    for step in range(10):
        reference |= by_id(run_step(whole, step, draws))
    pool, draws, found = inline_pool(settings), Draws(), {}
    for step in range(10):
        found |= by_id(run_step(pool, step, draws))
        state = json.loads(json.dumps(pool.state_dict()))
        pool.close()
        pool = inline_pool(settings)
        pool.load_state_dict(state)
        draws = Draws(first=pool.next_draw)
    common = set(reference) & set(found)
    assert len(common) >= 45
    assert all(reference[i] == found[i] for i in common)


def test_groups_that_were_not_settled_before_the_checkpoint_are_handed_over_again():
    settings = config(workers=1, **{"lambda": 1.0})
    pool = inline_pool(settings)
    groups = run_step(pool, 0, Draws(), settle=False)
    for group in groups[1:]:
        pool.settle(group.draw, dropped="for the test")
    state = json.loads(json.dumps(pool.state_dict()))
    again = inline_pool(settings)
    again.load_state_dict(state)
    repeated = run_step(again, 1, Draws(first=again.next_draw))
    assert repeated[0].draw == groups[0].draw
    assert by_id(repeated[:1]) == by_id(groups[:1])
    assert again.controller.ledger.dropped == {"for the test": 3}


def test_a_checkpoint_of_another_seed_or_group_size_is_refused():
    state = inline_pool(config()).state_dict()
    with pytest.raises(RunError, match="run seed 7, not 8"):
        inline_pool(config(), run_seed=8).load_state_dict(state)
    with pytest.raises(RunError, match="3 samples, the config asks for 4"):
        inline_pool(config(samples=4)).load_state_dict(state)


def test_a_piece_that_is_missing_or_comes_twice_stops_the_run():
    controller = Controller(config(workers=1), 7)
    controller.begin_step(0, 0)
    controller.admit(0, problem(0))
    work = controller.next_work(0, steal=False)
    piece = Sampled(work.id, work.dispatch, 0, [5, 6], [-1.0, -1.0], 0)
    controller.receive(0, [piece])
    with pytest.raises(RunError, match="belongs at token 0, but 2 are there"):
        controller.receive(0, [piece])
    with pytest.raises(RunError, match="belongs at token 4, but 2 are there"):
        controller.receive(0, [Sampled(work.id, work.dispatch, 4, [7], [-1.0], 0)])
    controller.receive(
        0, [Sampled(work.id, work.dispatch - 1, 9, [7], [-1.0], 0)]
    )  # an earlier dispatch: void
    assert controller.counts["void_events"] == 1


def test_a_group_settled_twice_or_never_stops_the_run():
    pool = inline_pool(config(**{"lambda": 1.0}))
    groups = run_step(pool, 0, Draws())
    with pytest.raises(RunError, match="was settled before"):
        pool.settle(groups[0].draw)
    pool.controller.handed_over.clear()
    pool.controller.groups.clear()
    pool.controller.ledger._open[99] = "vanished"
    with pytest.raises(RunError, match=r"1 draws are lost: 99 \('vanished'\)"):
        pool.state_dict()


@pytest.mark.parametrize("policy", ["drop", "restart", "keep"])
def test_tokens_older_than_the_cap_are_never_handed_over(policy):
    fields = {"max_staleness": 1, "on_stale": policy}
    settings = config(groups=2, samples=4, slice_s=1e-6, workers=2, min_groups=0, **{"lambda": 0.3}, **fields)
    pool, draws, oldest, dropped = inline_pool(settings, longest=150), Draws(), 0, 0
    for step in range(14):
        for group in run_step(pool, step, draws):
            for t in group.trajectories:
                if t.stop_reason is StopReason.STALE:
                    dropped += 1
                    assert t.status is Status.FAILED
                elif t.policy_versions:
                    oldest = max(oldest, pool.version - min(t.policy_versions))
                assert not any(s.author is Author.ENVIRONMENT for s in t.segments)
        pool.publish(publication(step + 1))
    assert (oldest > 1) is (policy == "keep")
    assert (dropped > 0) is (policy == "drop")
    assert (pool.controller.counts["restarted"] > 0) is (policy == "restart")


def test_a_stream_that_ends_ends_the_step_with_what_there_is():
    pool = inline_pool(config(groups=4, samples=3, **{"lambda": 1.0}))
    groups = run_step(pool, 0, Draws(only=2))
    assert sorted(g.draw for g in groups) == [0, 1]
    assert run_step(pool, 1, Draws(only=0)) == []


def test_progress_says_how_far_a_step_is():
    pool = inline_pool(config(progress_s=1e-9, workers=1, slice_s=1e-6))
    events = list(pool.rollout(0, Draws()))
    steps = [e for e in events if isinstance(e, Progress)]
    assert len(steps) > 3
    assert all(a.done <= b.done for a, b in itertools.pairwise(steps))
    assert steps[-1].wanted == 9 <= steps[-1].done
    assert set(steps[-1].by_effort) <= {"low", "high", "max"}
    assert steps[-1].tokens == sum(
        t.sampled_tokens for g in events if isinstance(g, Group) for t in g.trajectories
    ) + sum(e.record.sampled for e in pool.controller.entries.values()) + sum(
        t.sampled_tokens for g in pool.controller.groups.values() for t in g.trajectories if t.done
    )


def test_group_siblings_share_a_worker_and_the_idle_take_from_the_busy():
    controller = Controller(config(workers=2, groups=4, samples=4), 7)
    for _ in range(controller.begin_step(0, 0)):
        draw = controller.scheduler.next_draw
        controller.admit(draw, problem(draw))
    homes = [{e.home for i, e in controller.entries.items() if i.startswith(f"{d}.")} for d in range(4)]
    assert homes == [{0}, {1}, {0}, {1}]
    mine = [controller.next_work(0, steal=False) for _ in range(9)]
    assert mine[8] is None
    assert {w.trajectory.draw for w in mine[:8]} == {0, 2}
    other = controller.next_work(0, steal=True)
    assert other.trajectory.draw in (1, 3)


def test_an_idle_worker_steals_running_trajectories_and_nothing_changes():
    fields = dict(groups=1, samples=8, slice_s=1e-6, workers=2, max_tokens=4000, **{"lambda": 1.0})
    results = []
    for stealing in (False, True):
        pool = inline_pool(config(work_stealing=stealing, max_in_flight=8, **fields), longest=800)
        results.append(by_id(run_step(pool, 0, Draws())))
        assert (pool.controller.counts["stolen"] > 0) is stealing
    assert results[0] == results[1]


def test_longest_first_starts_long_problems_first_once_they_are_known():
    settings = config(groups=6, samples=2, workers=1, max_in_flight=1, **{"lambda": 1.0})
    controller = Controller(settings, 7)
    for number in range(6):
        controller.lengths.finished(problem(number, effort=None), -1 - number, 10 * (number + 1))
    for _ in range(controller.begin_step(0, 0)):
        draw = controller.scheduler.next_draw
        controller.admit(draw, problem(draw, effort=None))
    order = [controller.next_work(0, steal=False).trajectory.draw for _ in range(12)]
    assert order == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0]


def test_unknown_groups_send_a_probe_first_and_reorder_by_what_it_tells():
    settings = config(groups=3, samples=3, workers=1, max_in_flight=1, **{"lambda": 1.0})
    controller = Controller(settings, 7)
    for _ in range(controller.begin_step(0, 0)):
        draw = controller.scheduler.next_draw
        controller.admit(draw, problem(draw, domain="same", effort=None))
    probes = [controller.next_work(0, steal=False) for _ in range(3)]
    assert [(w.trajectory.draw, w.trajectory.sample) for w in probes] == [(0, 0), (1, 0), (2, 0)]
    for work, length in zip(probes, (5, 90, 40), strict=True):
        controller.lengths.finished(work.problem, work.trajectory.draw, length)
        controller.queue.reorder(
            work.trajectory.draw, controller.lengths.total(work.problem, work.trajectory.draw)
        )
    order = [controller.next_work(0, steal=False).trajectory.draw for _ in range(6)]
    assert order == [1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize("mode", ["one_step_off", "in_flight"])
def test_asynchronous_modes_generate_while_the_recipe_trains(mode):
    settings = config(
        groups=3, samples=3, workers=2, mode=mode, resume="keep_cache", slice_s=0.001, **{"lambda": 1.0}
    )
    pool, draws, found, ages = inline_pool(settings, longest=400, max_slots=3), Draws(), {}, Counter()
    for step in range(6):
        groups = run_step(pool, step, draws)
        found |= by_id(groups)
        before = pool.controller.counts["tokens"]
        time.sleep(0.05)  # training
        if step == 0:
            assert pool.controller.counts["tokens"] > before
        ages.update(pool.version - v for g in groups for t in g.trajectories for v in t.policy_versions)
        pool.publish(publication(step + 1))
    pool.close()
    assert max(ages) >= 1
    end_id = make_worker(settings, 0).engine.end_id
    for id_, row in found.items():
        draw, sample = map(int, id_.split("."))
        key = stream_key(7, f"p{draw}", draw, sample)
        length = min(200, hashed_length(key, 400))
        tokens = [token_at(key, i) for i in range(length)]
        if length == hashed_length(key, 400):
            tokens[-1] = end_id
        assert row[0] == tokens


def test_ten_thousand_in_flight_cost_the_controller_less_than_a_millisecond_each():
    """Controller alone: events of a simulated engine, made before the clock runs."""
    costs = {}
    for groups in (125, 1250):
        settings = config(groups=groups, samples=8, workers=4, max_in_flight=100_000, **{"lambda": 0.75})
        costs[groups * 8] = _overhead(settings)
    print({n: f"{c * 1e6:.0f} us" for n, c in costs.items()})
    assert all(c < 1e-3 for c in costs.values())
    assert costs[10_000] < 3 * costs[1_000]


def _overhead(settings) -> float:
    """Seconds of controller per finished trajectory, over two steps."""
    rng = random.Random(0)
    controller, spent, finished = Controller(settings, 7), 0.0, 0
    workers = [make_worker(settings, i, max_slots=100_000, tokens_per_step=5, longest=80) for i in range(4)]
    for step in range(2):
        clock = time.perf_counter()
        for _ in range(controller.begin_step(step, 0)):
            draw = controller.scheduler.next_draw
            controller.admit(draw, problem(draw % 1000))
        spent += time.perf_counter() - clock
        while not controller.scheduler.step_over():
            index = rng.randrange(4)
            clock = time.perf_counter()
            told = controller.take_orders(index)
            work = []
            while (item := controller.next_work(index, steal=False)) is not None:
                work.append(item)
            spent += time.perf_counter() - clock
            # The worker gets its own copies, as it does over Ray; that copy is the transport's cost.
            work = [type(w)(w.problem, _copied(w.trajectory), w.key, w.dispatch) for w in work]
            report = workers[index].advance(Orders(told.forget, told.discard, [], work), 1e-9)
            clock = time.perf_counter()
            before = controller.counts["finished"]
            controller.receive(index, report.events)
            for group in controller.take_surfaced():
                controller.settle(group.draw)
            spent += time.perf_counter() - clock
            finished += controller.counts["finished"] - before
        controller.pausing = True
        for index, worker in enumerate(workers):
            events = worker.pause().events
            clock = time.perf_counter()
            controller.receive(index, events)
            spent += time.perf_counter() - clock
        controller.pausing = False
        for group in controller.take_surfaced():
            controller.settle(group.draw)
        clock = time.perf_counter()
        controller.end_step()
        spent += time.perf_counter() - clock
    return spent / finished


def _copied(trajectory):
    from rollout.record import trajectory_from_json, trajectory_to_json

    return trajectory_from_json(json.loads(json.dumps(trajectory_to_json(trajectory))))


def test_scores_come_back_in_order_from_all_workers():
    pool = inline_pool(config(workers=3))
    sequences = [[FIRST_ORDINARY + i] * (i + 2) for i in range(7)]
    scores = pool.score(sequences, [1] * 7)
    assert scores == [[-float((FIRST_ORDINARY + i) % 7)] * (i + 1) for i in range(7)]


def test_sleeping_workers_refuse_weights_and_wake_up():
    pool, draws = inline_pool(config(workers=2)), Draws()
    run_step(pool, 0, draws)
    pool.sleep(1)
    with pytest.raises(RunError, match="wake them first"):
        pool.publish(publication(1))
    pool.wake()
    acks = pool.publish(publication(1))
    assert [a.version for a in acks] == [1, 1]
    assert run_step(pool, 1, draws)
