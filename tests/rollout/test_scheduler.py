"""The scheduler against a plain model of it, over random schedules."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from k3rl.errors import RunError
from rollout.ledger import Ledger
from rollout.scheduler import Place, Plan, Scheduler


def start(scheduler: Scheduler, step: int, version: int | None = None):
    begun = scheduler.begin_step(step, step if version is None else version)
    new = [id_ for _ in range(begun.need_groups) for id_ in scheduler.admit(scheduler.next_draw)]
    return begun, new


def test_a_step_ends_at_lambda_and_the_paused_resume_first_oldest_first():
    scheduler = Scheduler(Plan(groups=3, samples=2, completion=0.5))
    begun, new = start(scheduler, 0)
    assert begun.resume == []
    assert new == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert [scheduler.on_finished(i) for i in ("2.1", "0.0")] == [None, None]
    assert not scheduler.step_over()
    assert scheduler.on_finished("0.1") == 0  # K-th of its group: handed over now
    assert scheduler.step_over()
    assert scheduler.end_step() == ["1.0", "1.1", "2.0"]
    begun, new = start(scheduler, 1)
    assert begun.resume == ["1.0", "1.1", "2.0"]
    assert new == ["3.0", "3.1", "4.0", "4.1"]  # 3 in flight: two groups reach N*K = 6
    assert scheduler.in_flight == 7


def test_min_groups_keeps_a_step_open():
    scheduler = Scheduler(Plan(groups=2, samples=2, completion=0.5, min_groups=1))
    start(scheduler, 0)
    scheduler.on_finished("0.0")
    scheduler.on_finished("1.0")
    assert not scheduler.step_over()
    assert scheduler.on_finished("1.1") == 1
    assert scheduler.step_over()


@pytest.mark.parametrize(
    ("completion", "groups", "samples"), [(0.1, 10, 3), (0.7, 10, 1), (0.75, 3, 8), (1, 4, 4)]
)
def test_target_is_the_exact_ceiling(completion, groups, samples):
    numerator = round(completion * 100)
    assert Plan(groups, samples, completion).target == -(-numerator * groups * samples // 100)


def test_finishing_twice_or_unknown_is_an_error():
    scheduler = Scheduler(Plan(groups=1, samples=2))
    start(scheduler, 0)
    scheduler.on_finished("0.0")
    with pytest.raises(RunError, match=r"0\.0 finished twice"):
        scheduler.on_finished("0.0")
    with pytest.raises(RunError, match=r"7\.0 is in no open group"):
        scheduler.on_finished("7.0")
    scheduler.on_finished("0.1")
    with pytest.raises(RunError, match="finished twice"):
        scheduler.on_finished("0.1")


def test_draws_come_in_order_and_never_above_the_bound():
    scheduler = Scheduler(Plan(groups=2, samples=2))
    scheduler.begin_step(0, 0)
    with pytest.raises(RunError, match="draw 1 came where draw 0"):
        scheduler.admit(1)
    scheduler.admit(0)
    scheduler.admit(1)
    with pytest.raises(RunError, match="with 4 trajectories in flight"):
        scheduler.admit(2)


def test_lambda_is_reachable_from_every_count_of_paused():
    for groups, samples in ((2, 8), (3, 5), (1, 4), (5, 2)):
        for completion in (0.25, 0.6, 0.9, 0.99, 1.0):
            plan = Plan(groups, samples, completion)
            for paused in range(plan.in_flight - plan.target + 1):
                need = -(-(plan.in_flight - paused) // samples)
                assert paused + need * samples >= plan.target
                assert paused + need * samples < plan.in_flight + samples


@pytest.mark.parametrize("policy", ["drop", "restart", "keep"])
def test_no_token_is_older_than_the_cap(policy):
    scheduler = Scheduler(
        Plan(groups=2, samples=2, completion=0.5, min_groups=0, max_staleness=1, on_stale=policy)
    )
    start(scheduler, 0)
    for id_ in ("0.0", "0.1", "1.0", "1.1"):
        scheduler.on_sampled(id_, 0)
    scheduler.on_finished("0.0")
    scheduler.on_finished("1.0")
    scheduler.end_step()
    begun, _ = start(scheduler, 1)  # staleness 1: allowed
    assert begun.resume == ["0.1", "1.1"]
    assert begun.stale == begun.restart == []
    scheduler.on_finished("0.1")  # group 0 is complete: no cap applies to it any more
    scheduler.on_finished("2.0")
    scheduler.end_step()
    begun, _ = start(scheduler, 2)
    if policy == "drop":  # 1.1 is dropped, and the finished 1.0 is too old as well: the group is complete
        assert begun.stale == ["1.0", "1.1"]
        assert begun.completed == [1]
        assert begun.resume == ["2.1"]
    elif policy == "restart":  # also the finished one: both were sampled under version 0
        assert begun.restart == ["1.0", "1.1"]
        assert begun.resume == ["2.1"]
        assert scheduler.place("1.0") is Place.RUNNING
    else:
        assert begun.resume == ["1.1", "2.1"]
    scheduler.check()


def test_asynchronous_steps_pause_nobody_and_count_on():
    scheduler = Scheduler(Plan(groups=2, samples=2, completion=0.5, min_groups=0, pause_rest=False))
    start(scheduler, 0)
    scheduler.on_finished("0.0")
    scheduler.on_finished("1.0")
    assert scheduler.end_step() == []
    assert scheduler.place("0.1") is Place.RUNNING
    scheduler.on_finished("0.1")  # between two steps: belongs to the next one's batch
    begun, new = start(scheduler, 1)
    assert begun.resume == []
    assert len(new) == 4
    assert scheduler.done_in_step == 1


def test_ledger_tells_lost_doubled_and_unknown_draws():
    ledger = Ledger()
    for draw in range(4):
        ledger.opened(draw, f"p{draw}")
    with pytest.raises(RunError, match=r"draw 6 \('p'\) came where draw 4"):
        ledger.opened(6, "p")
    ledger.settle(1)
    ledger.settle(2, "zero advantage")
    ledger.check(generating=[0], handed_over=[3])
    for generating, handed_over, words in (
        ([0], [], r"1 draws are lost: 3 \('p3'\)"),
        ([0, 3], [3], "held twice: 3"),
        ([0, 1], [3], "settled, yet in flight: 1"),
    ):
        with pytest.raises(RunError, match=words):
            ledger.check(generating, handed_over)
    with pytest.raises(RunError, match="draw 1 cannot be trained, it was settled before"):
        ledger.settle(1)
    with pytest.raises(RunError, match="never drawn"):
        ledger.settle(9)
    copy = Ledger()
    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    copy.check(generating=[0, 3], handed_over=[])
    assert (copy.trained, dict(copy.dropped)) == (1, {"zero advantage": 1})


class Schedules(RuleBasedStateMachine):
    """Random schedules, restarts of the process among them, against sets kept by hand."""

    @initialize(
        groups=st.integers(1, 5),
        samples=st.integers(1, 4),
        completion=st.floats(0.05, 1.0),
        cap=st.sampled_from([None, 0, 1, 2]),
        policy=st.sampled_from(["drop", "restart", "keep"]),
        pause_rest=st.booleans(),
        data=st.data(),
    )
    def begin(self, groups, samples, completion, cap, policy, pause_rest, data):
        minimum = data.draw(st.integers(0, groups))
        self.plan = Plan(groups, samples, completion, minimum, cap, policy, pause_rest)
        self.scheduler, self.ledger = Scheduler(self.plan), Ledger()
        self.running: set[str] = set()
        self.paused: set[str] = set()
        self.left: dict[int, int] = {}  # draw -> unfinished
        self.versions: dict[str, int] = {}
        self.finished: set[str] = set()
        self.handed: list[int] = []
        self.step, self.done, self.groups_done, self.in_step = -1, 0, 0, False

    def _finish(self, id_: str) -> None:
        draw = int(id_.split(".")[0])
        self.running.discard(id_)
        self.paused.discard(id_)
        self.finished.add(id_)
        self.left[draw] -= 1
        if self.left[draw] == 0:
            del self.left[draw]
            self.handed.append(draw)
            self.groups_done += 1

    def _aged(self, version: int) -> list[str]:
        alive = [f"{d}.{s}" for d in sorted(self.left) for s in range(self.plan.samples)]
        return [
            i for i in alive if i in self.versions and version - self.versions[i] > self.plan.max_staleness
        ]

    @precondition(lambda self: not self.in_step)
    @rule()
    def begin_step(self):
        self.step += 1
        self.in_step = True
        if self.plan.pause_rest:
            self.done = self.groups_done = 0
        begun = self.scheduler.begin_step(self.step, self.step)
        aged = (
            [] if self.plan.max_staleness is None or self.plan.on_stale == "keep" else self._aged(self.step)
        )
        if self.plan.on_stale == "restart":
            assert begun.restart == aged
            for id_ in aged:
                self.left[int(id_.split(".")[0])] += id_ in self.finished
                self.finished.discard(id_)
                self.running.discard(id_)
                self.paused.add(id_)
                del self.versions[id_]
        else:
            assert begun.stale == aged
            before = len(self.handed)
            for id_ in aged:
                del self.versions[id_]
                if id_ not in self.finished:
                    self._finish(id_)
            assert begun.completed == self.handed[before:]
        by_age = sorted(self.paused, key=lambda i: tuple(map(int, i.split("."))))
        assert begun.resume == [i for i in by_age if i not in begun.restart]
        self.running |= self.paused
        self.paused = set()
        for _ in range(begun.need_groups):
            draw = self.scheduler.next_draw
            self.ledger.opened(draw, "p")
            ids = self.scheduler.admit(draw)
            self.running |= set(ids)
            self.left[draw] = len(ids)
        assert self.scheduler.need_groups() == 0
        assert (
            self.plan.in_flight <= len(self.running) < self.plan.in_flight + self.plan.samples
            or begun.need_groups == 0
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def sample(self, data):
        id_ = data.draw(st.sampled_from(sorted(self.running)))
        version = max(self.step, 0)
        self.scheduler.on_sampled(id_, version)
        self.versions[id_] = min(version, self.versions.get(id_, version))

    @precondition(lambda self: self.running or self.paused)
    @rule(data=st.data())
    def finish(self, data):
        id_ = data.draw(st.sampled_from(sorted(self.running | self.paused)))
        before = len(self.handed)
        self._finish(id_)
        self.done += 1
        assert self.scheduler.on_finished(id_) == (self.handed[-1] if len(self.handed) > before else None)

    @precondition(lambda self: self.in_step)
    @rule()
    def end_step_when_over(self):
        enough = self.done >= self.plan.target and self.groups_done >= self.plan.min_groups
        assert self.scheduler.step_over() == (enough or not self.running)
        if not self.scheduler.step_over():
            with pytest.raises(RunError):
                self.scheduler.end_step()
            return
        paused = self.scheduler.end_step()
        self.in_step = False
        if self.plan.pause_rest:
            assert paused == sorted(self.running, key=lambda i: tuple(map(int, i.split("."))))
            self.paused, self.running = self.running, set()
        else:
            self.done = self.groups_done = 0
            assert paused == []

    @precondition(lambda self: not self.in_step)
    @rule()
    def process_dies_between_steps(self):
        state = json.loads(json.dumps(self.scheduler.state_dict()))
        self.scheduler = Scheduler(self.plan)
        self.scheduler.load_state_dict(state)
        self.paused |= self.running
        self.running = set()

    @rule()
    def settle(self):
        if self.handed:
            self.ledger.settle(self.handed.pop(0))

    @invariant()
    def nothing_is_lost_or_twice(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        self.ledger.check(self.scheduler.open_draws(), self.handed)
        assert self.scheduler.in_flight == len(self.running) + len(self.paused)
        assert self.scheduler.in_flight < self.plan.in_flight + self.plan.samples + (
            self.plan.in_flight if self.plan.on_stale == "restart" else 0
        )


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_thousands_of_random_runs_hand_over_every_draw_once():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        plan = Plan(rng.randint(1, 6), rng.randint(1, 5), rng.uniform(0.1, 1.0), min_groups=0)
        scheduler, running, handed = Scheduler(plan), [], []
        for step in range(rng.randint(1, 12)):
            begun, new = start(scheduler, step)
            assert begun.resume == running
            running += new
            while not scheduler.step_over():
                draw = scheduler.on_finished(running.pop(rng.randrange(len(running))))
                handed += [] if draw is None else [draw]
            running = scheduler.end_step()
            assert math.isclose(scheduler.done_in_step, plan.target)
        assert len(set(handed)) == len(handed)
        assert not set(handed) & scheduler.open_draws()
        assert set(handed) | scheduler.open_draws() == set(range(scheduler.next_draw))


def test_a_checkpoint_from_inside_a_step_goes_on_with_its_counts():
    scheduler = Scheduler(Plan(groups=2, samples=2, completion=0.75))
    start(scheduler, 0)
    scheduler.on_finished("0.0")
    scheduler.on_finished("0.1")
    copy = Scheduler(scheduler.plan)
    copy.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    begun = copy.begin_step(0, 0)
    assert begun.resume == ["1.0", "1.1"]
    assert begun.need_groups == 0
    copy.on_finished("1.1")
    assert copy.step_over()
    other = Scheduler(Plan(groups=2, samples=3))
    with pytest.raises(RunError, match="2 samples, the config asks for 3"):
        other.load_state_dict(scheduler.state_dict())
