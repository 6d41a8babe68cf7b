"""Teachers that fail: a server that goes away, answers too little, means other tokens; an actor that dies. Each is
tried again or stops the run with its reason; log-probs never move to a neighbour's token."""

import random
import threading
import time

import pytest
import ray
from teacher_server import TeacherServer

from distill.diagnostics import GapLog, Gate, disagreement, largest_gaps
from distill.pool import TeacherPool
from distill.remote import RemoteScorer
from distill.teachers import Teachers
from distill.token_rewards import Opinion
from k3rl.chat import load_renderer
from k3rl.config.distill import RemoteTeacher, TeacherConfig, TeacherPoolConfig, TokenRewardConfig
from k3rl.errors import RunError, UserError
from k3rl.models import ModelConfig, build_model, load_model, save_model
from k3rl.quant.config import QatConfig
from k3rl.types import Author, Channel, Segment, Trajectory

RENDERER = load_renderer("k3-nano")
OVERRIDES = {"num_hidden_layers": 2, "attn_res_block_size": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three of one architecture."""
    folder = tmp_path_factory.mktemp("teachers")
    for seed in range(3):
        save_model(
            build_model(ModelConfig(overrides=OVERRIDES), seed=seed), folder / str(seed), "k3rl/chat/nano"
        )
    return [ModelConfig(path=str(folder / str(seed))) for seed in range(3)]


@pytest.fixture(scope="module")
def cluster():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def server(models):
    made = TeacherServer(models[0])
    yield made
    made.stop()


def scorer(server, **changes) -> RemoteScorer:
    settings = {
        "url": server.url,
        "model": "teacher",
        "timeout_s": 5.0,
        "attempts": 3,
        "backoff_s": 0.05,
        **changes,
    }
    return RemoteScorer(RemoteTeacher(**settings), "far", RENDERER)


def sequences(count: int, seed: int = 0) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(3, 500) for _ in range(rng.randint(12, 60))], rng.randint(1, 10))
        for _ in range(count)
    ]


def test_a_server_gives_what_the_model_gives(server, models):
    asked, far = sequences(5), scorer(server, model="")
    far.handshake()
    assert far.model == "teacher"
    rows = [future.result() for future in [far.submit(ids, start) for ids, start in asked]]
    near = Teachers(models[:1], "cpu", 256)
    for (ids, start), row in zip(asked, rows, strict=True):
        assert row == near.score([(0, ids, start)])[0]
    far.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("short", r"teacher 'far': http.* gave 29 log-probs for 30 tokens"),
        ("shifted", r"says nothing about token \d+ at position 4"),
        ("refused", r"answered 400: prompt is longer than the model's context"),
        ("plain", r"has no prompt_logprobs; it must be a server that gives them"),
    ],
)
def test_a_wrong_answer_stops_at_once_and_says_why(server, fault, message):
    server.fault = fault
    with pytest.raises(RunError, match=message):
        scorer(server).submit(list(range(40, 70)), 4).result()
    assert server.answered == 1


def test_a_passing_fault_is_tried_again(server):
    far = scorer(server)
    ids = list(range(40, 70))
    good = far.submit(ids, 4).result()
    server.fault, server.answered = "busy", 0
    assert far.submit(ids, 4).result() == good
    assert far.retries == 1
    server.fault = "html"
    with pytest.raises(RunError, match=r"did not answer in 3 tries \(JSONDecodeError.*start it again"):
        far.submit(ids, 4).result()


def test_a_tokenizer_that_differs_in_one_id_is_found_before_the_start(server):
    server.texts = {77: "zebra"}
    ours = RENDERER.decode([77])
    with pytest.raises(UserError, match=f"token 77 is 'zebra' at http.* and {ours!r} for the student"):
        scorer(server).handshake()


def test_no_server_and_no_such_model_are_found_before_the_start(server):
    with pytest.raises(UserError, match=r"no model 'teachr' at .*; did you mean 'teacher'"):
        scorer(server, model="teachr").handshake()
    with pytest.raises(UserError, match="did not answer in 2 tries"):
        RemoteScorer(
            RemoteTeacher(url="http://127.0.0.1:9/v1", attempts=2, backoff_s=0.01), "far", RENDERER
        ).handshake()


def test_a_server_that_goes_down_and_comes_back_costs_nothing_but_time(server, models):
    far = scorer(server, attempts=8, concurrency=2)
    teachers = [TeacherConfig(name="far", model=models[0], remote=far.config)]
    pool = TeacherPool(teachers, "cpu", remote={0: far})
    asked = sequences(12, seed=1)
    before = server.answered
    tickets = [pool.ask(0, ids, start) for ids, start in asked]
    while server.answered < before + 3:
        time.sleep(0.005)
    server.stop()
    threading.Timer(0.4, server.start).start()
    rows = pool.answers()
    assert sorted(rows) == tickets
    assert pool.statistics()["teacher/retries"] > 0
    near = Teachers(models[:1], "cpu", 256)
    for ticket, (ids, start) in zip(tickets, asked, strict=True):
        assert rows[ticket] == near.score([(0, ids, start)])[0]
    pool.close()


def test_local_teachers_are_asked_in_batches_answers_are_kept_and_a_death_is_survived(cluster, models):
    teachers = [TeacherConfig(name=str(i), model=m) for i, m in enumerate(models)]
    pool = TeacherPool(teachers, "cpu", 256, TeacherPoolConfig(actors=1))
    asked = [(i % 3, ids, start) for i, (ids, start) in enumerate(sequences(12, seed=2))]
    tickets = [pool.ask(*question) for question in asked]
    ray.kill(pool._actors[0].handle)
    rows = pool.answers()
    assert pool.deaths >= 1
    near = Teachers(models, "cpu", 256)
    for ticket, (teacher, ids, start) in zip(tickets, asked, strict=True):
        assert rows[ticket].logprobs == pytest.approx(
            near.score([(teacher, ids, start)])[0].logprobs, abs=2e-5
        )
    again = [pool.ask(*question) for question in asked]
    assert pool.hits == 12
    assert [rows[t] for t in tickets] == [row for _, row in sorted(pool.answers().items())]
    assert again == list(range(12, 24))
    pool.ask(0, [5] * 300, 4)
    with pytest.raises(RunError, match=r"a teacher cannot score: .*exceeds the context of 256"):
        pool.answers()
    pool.close()


def test_packed_teachers_take_turns_and_stay_what_they_are(models):
    trained_for_it = [m.model_copy(update={"qat": QatConfig()}) for m in models]
    requests = [(i % 3, ids, start) for i, (ids, start) in enumerate(sequences(9, seed=3))]
    loaded = Teachers(trained_for_it, "cpu", 256)
    packed = Teachers(trained_for_it, "cpu", 256, storage="mxfp4")
    assert packed.score(requests) == loaded.score(requests)
    assert loaded.statistics()["teacher/swaps"] == 0
    assert packed.statistics()["teacher/swaps"] == 3  # 9 questions, one swap a teacher
    for rule in ("floor", "even"):
        other = [m.model_copy(update={"qat": QatConfig(rule=rule)}) for m in models[:2]]
        one = [(1, *requests[0][1:])]
        assert Teachers(other, "cpu", 256, storage="mxfp4").score(one) == Teachers(other, "cpu", 256).score(
            one
        )
    packed.score([(2, *requests[0][1:])])  # whose weights are in place
    found = packed.statistics()
    assert found["teacher/swaps"] == 3
    whole = sum(t.numel() * t.element_size() for _, t in load_model(models[0]).named_weights())
    assert 0 < found["teacher/moved_bytes"] < 3 * whole
    assert found["teacher/moved_bytes"] == found["teacher/resting_bytes"]
    with pytest.raises(UserError, match="was not trained for mxfp4"):
        Teachers(models, "cpu", 256, storage="mxfp4")


def opinion(draw: int, student: list[float], teacher: list[float], number: int = 0) -> Opinion:
    t = Trajectory(f"p{draw}", draw, 0, "general", None, [5, 6])
    ids = [100 + draw + i for i in range(len(student))]
    t.segments = [
        Segment(Author.ENVIRONMENT, Channel.OBSERVATION, [50]),
        Segment(Author.MODEL, Channel.RESPONSE, ids, student, 0),
    ]
    return Opinion(t, number, teacher, student)


def test_the_gate_warns_once_a_teacher_and_stops_where_told(caplog):
    gate = Gate(TokenRewardConfig(warn_kl=0.15))
    found = {"teacher/kl/teacher/near": 0.04, "teacher/kl/teacher/far": 0.19, "teacher/kl": 0.1}
    gate.check(found)
    gate.check({"teacher/kl/teacher/near": 0.5})
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["teacher 'far'"]
    with pytest.raises(RunError, match=r"teacher 'far'.* 0.190 nats .* above token_rewards.stop_kl 0.15"):
        Gate(TokenRewardConfig(stop_kl=0.15)).check(found)


def test_the_largest_gaps_are_the_tokens_at_which_teacher_and_student_differ_most(tmp_path):
    made = [opinion(0, [-1.0, -2.0], [-1.5, -9.0]), opinion(1, [-0.1], [-4.0])]
    gaps = largest_gaps(made, ["a"], RENDERER, 2)
    assert [(g["trajectory"], g["position"], g["token"]) for g in gaps] == [("0.0", 2, 101), ("1.0", 1, 101)]
    assert gaps[0]["before"] == RENDERER.decode([50, 100])
    log = GapLog(tmp_path / "gaps.jsonl")
    log.write(0, gaps)
    log.write(1, gaps)
    GapLog(tmp_path / "gaps.jsonl").write(1, gaps[:1])  # resumed: step 1 is done again
    assert [line[:10] for line in log.path.read_text().splitlines()] == ['{"step": 0'] * 2 + ['{"step": 1']


def test_disagreement_counts_teachers_that_pull_in_opposite_directions():
    made = [opinion(0, [-1.0, -1.0, -1.0], [-0.5, -0.5, -2.0])]
    found = disagreement(made, [{1: [-1.5, -0.75, -3.0]}], ["a", "b"])
    assert found["teacher/disagreement"] == pytest.approx((1 + 0.25 + 1) / 3)
    assert found["teacher/opposed_share"] == pytest.approx(1 / 3)
    assert found["teacher/disagreement/teacher/b"] == found["teacher/disagreement"]
    assert disagreement(made, [{}], ["a", "b"]) == {}
