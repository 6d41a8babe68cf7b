"""Recorded experts travel with their tokens: through turns, pauses, deaths of workers and checkpoints, and the trainer
takes the same ones."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from rollout_helpers import Draws, config, run_step
from test_faults import FaultyTransport

from k3rl.chat import load_renderer
from k3rl.config.rollout import RolloutConfig
from k3rl.config.trainer import AdamWConfig, TrainerConfig
from k3rl.errors import RunError
from k3rl.models import ModelConfig, build_model
from k3rl.trainer import TrainerWorker
from k3rl.types import Author, Channel, Segment, Status, StopReason, Trajectory
from k3rl.weights import Publisher, make_transport
from rollout.engine import Generation, SamplingParams
from rollout.environment import Opening, Reply, Turn
from rollout.native import NativeEngine
from rollout.pool import RolloutPool
from rollout.record import Record, Sampled, Started, trajectory_from_json, trajectory_to_json
from rollout.routing import RoutingRows
from rollout.transport import InlineTransport
from rollout.worker import RolloutWorker

RENDERER = load_renderer("k3-nano")
NANO = ModelConfig(path="k3-nano", overrides={"num_hidden_layers": 2, "attn_res_block_size": 1})
CONTEXT = 256
STEPS = 4


class Talker:
    """An environment that answers everything; its trajectories end by a limit, some of them after its answer."""

    async def reset(self) -> Opening:
        return Opening()

    async def step(self, turn: Turn) -> Reply:
        return Reply([{"role": "user", "content": f"Go on, {turn.number}."}])

    async def pause(self) -> None: ...

    async def resume(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def sandbox(self) -> None:
        return None


def settings_with(**fields: Any) -> RolloutConfig:
    base: dict[str, Any] = {
        "groups": 3,
        "samples": 3,
        "lambda": 0.5,
        "slice_s": 1e-6,
        "max_tokens": 24,
        "max_context": CONTEXT,
        "engine": {"type": "native", "max_slots": 6, "max_batch_tokens": 48, "record_routing": True},
        "sampling": {"stop_strings": ["e"]},
        "agent": {"max_turns": 3},
        "max_retries": 200,
        "max_worker_faults": 100_000,
    }
    return config(**(base | fields))


def pool_of(settings: RolloutConfig, deaths: float = 0.0) -> RolloutPool:
    def make(index: int) -> RolloutWorker:
        engine = NativeEngine(
            build_model(NANO, 1),
            settings.engine.max_slots,
            CONTEXT,
            RENDERER.stop_token_ids,
            decode=RENDERER.decode,
            max_batch_tokens=settings.engine.max_batch_tokens,
            keep_cache=settings.resume == "keep_cache",
            reuse_stale=settings.resume == "keep_cache",
            record_routing=True,
        )
        return RolloutWorker(
            settings, engine, RENDERER, CONTEXT, name=f"rollout-{index}", environment=lambda p: Talker(),
            get=lambda x: x,
        )  # fmt: skip

    methods = ("advance", "pause")
    faulty = FaultyTransport(make, random.Random(3), deaths, methods) if deaths else InlineTransport(make)
    return RolloutPool(settings, make, run_seed=7, transport=faulty)


def trainer_with(replay: bool) -> TrainerWorker:
    chosen = TrainerConfig(optimizer=AdamWConfig(lr=1e-2), replay_routing=replay)
    return TrainerWorker(build_model(NANO, 1), chosen, seed=1, device="cpu")


def publish(pool: RolloutPool, trainer: TrainerWorker) -> None:
    transport = make_transport("shm", put=lambda x: x)
    weights = [(name, t.detach().clone()) for name, t in trainer.model.named_weights()]
    pool.publish(Publisher(transport).publish(weights, trainer.version))


class Agreement:
    """(token, layer) pairs of the steps so far: those that the engine read, and those where the trainer took the
    same experts."""

    def __init__(self, trainer: TrainerWorker) -> None:
        self.read = self.same = 0
        count = trainer.experts._count

        def watched(ids_TLK: torch.Tensor, recorded_TLK: torch.Tensor, read_T: torch.Tensor) -> None:
            same_TL = (ids_TLK.sort(-1).values == recorded_TLK.sort(-1).values).all(-1)
            self.read += int(read_T.sum()) * ids_TLK.shape[1]
            self.same += int(same_TL[read_T].sum())
            count(ids_TLK, recorded_TLK, read_T)

        trainer.experts._count = watched


def train(trainer: TrainerWorker, done: list[Trajectory], rng: random.Random) -> dict[str, float]:
    for t in done:
        t.advantage = rng.uniform(-1, 1)
    return trainer.step(done)


def reloaded(pool: RolloutPool, settings: RolloutConfig) -> RolloutPool:
    """Another pool, from what a checkpoint of this one says."""
    state = json.loads(json.dumps(pool.state_dict()))
    before = {t.id: t.routing for g in pool.controller.groups.values() for t in g.trajectories}
    pool.close()
    other = pool_of(settings)
    other.load_state_dict(state)
    after = {t.id: t.routing for g in other.controller.groups.values() for t in g.trajectories}
    assert before.keys() == after.keys()
    assert any(routing is not None for routing in after.values()), (
        "nothing was paused: the test shows nothing"
    )
    for id_, routing in after.items():
        assert (routing is None) == (before[id_] is None)
        if routing is not None:
            assert routing.dtype == np.int16
            assert np.array_equal(routing, before[id_])
    return other


def read_under(t: Trajectory) -> list[int]:
    """By token that the engine read: the policy version under which it was first read, that of the next sampled."""
    versions = [-1] * len(t.prompt_ids)
    for s in t.segments:
        versions += [s.policy_version if s.author is Author.MODEL else -1] * len(s)
    out, following = [-1] * len(versions), -1
    for i in range(len(versions) - 1, -1, -1):
        out[i] = following
        following = versions[i] if versions[i] >= 0 else following
    return [v for v in out if v >= 0]


@torch.no_grad()
def chosen_by(weights: dict[str, torch.Tensor], t: Trajectory) -> np.ndarray:
    """Experts by token in one packed forward under these weights."""
    model = build_model(NANO, 1)
    model.load_state_dict(weights)
    ids = torch.tensor([*t.prompt_ids, *t.token_ids])
    with model.eval().record_routing() as record:
        model(ids, torch.tensor([0, len(ids)]))
    return record.ids_TLK().numpy()


@pytest.mark.parametrize(
    ("what", "replay"), [("plain", True), ("plain", False), ("checkpoints", True), ("deaths", True)]
)
def test_every_token_keeps_the_experts_of_its_first_reading_and_the_trainer_takes_them(what, replay):
    settings, rng = settings_with(), random.Random(1)
    pool, trainer = pool_of(settings, 0.05 if what == "deaths" else 0.0), trainer_with(replay)
    agreement, draws = Agreement(trainer), Draws()
    weights = {0: {n: p.clone() for n, p in trainer.model.state_dict().items()}}
    publish(pool, trainer)
    seen, rows, metrics = [], 0, []
    for step in range(STEPS):
        done = [t for g in run_step(pool, step, draws) for t in g.trajectories]
        seen += done
        rows += sum(len(t.routing) for t in done)
        if done:
            metrics.append(train(trainer, done, rng))
            read = sum(len(t.routing) for t in done)  # all but the last token that was sampled
            assert metrics[-1]["moe/recorded_share"] == pytest.approx(read / (read + len(done)))
        weights[trainer.version] = {n: p.clone() for n, p in trainer.model.state_dict().items()}
        if what == "checkpoints":
            pool = reloaded(pool, settings)
            draws = Draws(first=pool.next_draw)
        publish(pool, trainer)
    if what == "deaths":
        assert pool.fleet.transport.deaths > 1
    pool.close()

    # What travelled is what each policy's own forward says of the tokens first read under it.
    same = total = of_the_last = 0
    for t in seen:
        versions = read_under(t)
        assert len(versions) == len(t.routing)
        expected = {v: np.sort(chosen_by(weights[v], t), -1) for v in set(versions)}
        ours = np.sort(t.routing, -1)
        same += sum(bool((ours[i] == expected[v][i]).all()) for i, v in enumerate(versions))
        of_the_last += sum(bool((ours[i] == expected[max(versions)][i]).all()) for i in range(len(versions)))
        total += len(versions)
    spanning = sum(len(set(t.policy_versions)) > 1 for t in seen)
    after_answer = sum(t.segments[-1].author is Author.ENVIRONMENT for t in seen)
    print(f"{len(seen)} trajectories, {spanning} over several versions, {after_answer} end with an answer")
    print(f"{total} tokens read: {same} as their own policy chooses, {of_the_last} as their last one")
    assert spanning >= 3
    assert sum(t.turns > 1 for t in seen) >= 3
    assert same >= 0.999 * total  # a near-tie may fall the other way in another batch
    assert of_the_last < 0.99 * total

    layers = len(trainer.model.config.moe_layers)
    print(f"trainer: {agreement.same} of {agreement.read} as the engine; {rows} rows of {layers} layers")
    assert agreement.read == rows * layers
    if replay:
        assert agreement.same == agreement.read
        assert all(m["moe/replay_disagreement"] == 0.0 for m in metrics)
    else:
        assert agreement.same < 0.99 * agreement.read
        assert any(m["moe/replay_disagreement"] > 0.01 for m in metrics)


@pytest.mark.parametrize("mode", ["partial", "in_flight"])
def test_kept_caches_keep_their_routing(mode):
    settings = settings_with(resume="keep_cache", mode=mode)
    pool, trainer, draws = pool_of(settings), trainer_with(True), Draws()
    agreement, rng = Agreement(trainer), random.Random(2)
    publish(pool, trainer)
    seen = []
    for step in range(STEPS):
        done = [t for g in run_step(pool, step, draws) for t in g.trajectories]
        seen += done
        if done:
            train(trainer, done, rng)
        publish(pool, trainer)
    pool.close()
    assert any(len(set(t.policy_versions)) > 1 for t in seen)
    assert agreement.same == agreement.read == sum(len(t.routing) for t in seen)


def test_twins_that_resume_keep_what_each_of_them_noted():
    """The same tokens so far: one prefill serves both, and neither record is changed by it."""
    model = build_model(NANO, 1)
    context = list(range(40, 60))
    held = [np.full((20 - i, 1, 2), [i, i + 1], np.int16) for i in range(2)]
    pair = [
        Generation(f"g{i}", context, SamplingParams(max_tokens=4, ignore_eos=True), key=i, routing=held[i])
        for i in range(2)
    ]
    engine = NativeEngine(model, 4, 128, record_routing=True)
    engine.submit(pair)
    finished = 0
    while finished < 2:
        finished += len(engine.step())
    for g, before in zip(pair, held, strict=True):
        assert g.routing.shape == (23, 1, 2)
        assert np.array_equal(g.routing[: len(before)], before)
        assert before.shape[0] in (19, 20)


def started(tokens: int) -> Record:
    record = Record(Trajectory("p", 0, 0, "general", None, []))
    record.apply(Started("0.0", 0, 0, [1] * tokens, {}, None))
    return record


def test_rows_that_are_lost_or_come_twice_are_found_at_once():
    rows = np.zeros((9, 2, 3), np.int16)
    for given in (rows[:5], rows[:7], None):
        record = started(4)
        record.apply(Sampled("0.0", 0, 0, [5, 6], [-1.0, -1.0], 0, rows[:5]))
        with pytest.raises(RunError, match=r"routing of \d+ tokens, but 8 were read"):
            record.apply(Sampled("0.0", 0, 2, [7, 8, 9], [-1.0] * 3, 0, given))
    record = started(4)
    record.apply(Sampled("0.0", 0, 0, [5, 6], [-1.0, -1.0], 0, rows[:5]))
    with pytest.raises(ValueError, match="layers, experts a token"):
        record.apply(Sampled("0.0", 0, 2, [7], [-1.0], 0, rows[:1, :1]))


def test_a_checkpoint_holds_routing_to_the_last_bit_and_reads_those_without():
    rng = np.random.default_rng(0)
    segment = Segment(Author.MODEL, Channel.RESPONSE, [5, 6], [-1.0, -2.0], 3)
    t = Trajectory("p", 1, 2, "general", None, [1, 2], [segment], Status.PAUSED, StopReason.STALE)
    for shape in ((3, 2, 4), (0, 2, 4)):
        t.routing = rng.integers(-(2**15), 2**15, shape).astype(np.int16)[:, ::-1]
        again = trajectory_from_json(json.loads(json.dumps(trajectory_to_json(t))))
        assert again.routing.dtype == np.int16
        assert again.routing.shape == shape
        assert np.array_equal(again.routing, t.routing)
    older = trajectory_to_json(t)
    del older["routing"]
    assert trajectory_from_json(older).routing is None


def test_rows_grow_without_changing_what_was_handed_out():
    held = np.arange(12, dtype=np.int16).reshape(2, 2, 3)
    rows, expected, handed = RoutingRows(held), [held], []
    for i in range(200):
        new = np.full((1 + i % 3, 2, 3), i, np.int16)
        rows.append(new)
        expected.append(new)
        handed.append((rows.array, np.concatenate(expected)))
    assert all(np.array_equal(a, b) for a, b in handed)
    assert np.array_equal(held, np.arange(12).reshape(2, 2, 3))
