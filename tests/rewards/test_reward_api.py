"""Plugging a function in: what it may be, what it gets, where it is found, how several combine."""

from __future__ import annotations

import importlib
import random
import shutil
import sys

import pytest
from pydantic import ValidationError
from reward_helpers import RENDERER, make_group, make_problem, make_trajectory

from k3rl.config.rewards import Replacement, RewardConfig, RewardPart
from k3rl.errors import UserError
from k3rl.types import Author, Channel, Group, Outcome, Segment, Status
from rewards import GraderError, JudgeError, Score, Scored, reward
from rewards.api import CLASHES, REGISTERED, Verdict, as_score
from rewards.calls import call_reward
from rewards.compose import combine
from rewards.registry import BUILT_IN, get_reward, load_modules
from rewards.worker import RewardWorker, check_rewards, scored_view, turns_of


@pytest.fixture(autouse=True)
def clean_registry():
    for name in BUILT_IN:
        get_reward(name)
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)
    CLASHES.clear()


def verdicts(function, contents: list[str], timeout_s: float | None = None, **arguments) -> list[Verdict]:
    group = make_group(contents)
    found = function.__k3rl_reward__
    views = [scored_view(group.problem, t, RENDERER) for t in group.trajectories]
    return [v for some in call_reward(found, views, found.bind(arguments), timeout_s) for v in some]


def values(function, contents: list[str], **arguments) -> list[float | None]:
    return [v.score.value if v.score else None for v in verdicts(function, contents, **arguments)]


def test_a_function_returns_a_number_a_bool_parts_or_a_score():
    @reward()
    def number(scored: Scored) -> float:
        return len(scored.content)

    @reward()
    def yes(scored: Scored) -> bool:
        return scored.content == "ab"

    @reward()
    def parts(scored: Scored) -> dict[str, float]:
        return {"a": 1.0, "b": -0.25}

    @reward()
    def total(scored: Scored) -> dict[str, float]:
        return {"a": 1.0, "b": 5.0, "total": 2.0}

    @reward()
    def explained(scored: Scored) -> Score:
        return Score(0.5, {"x": 1.0}, "because")

    assert values(number, ["ab", ""]) == [2.0, 0.0]
    assert values(yes, ["ab", "c"]) == [1.0, 0.0]
    assert values(parts, ["ab"]) == [0.75]
    (found,) = verdicts(total, ["ab"])
    assert (found.score.value, found.score.components) == (2.0, {"a": 1.0, "b": 5.0})
    (found,) = verdicts(explained, ["ab"])
    assert (found.score.value, found.explanation) == (0.5, "because")


@pytest.mark.parametrize(
    "bad", [None, "1", b"1", float("nan"), float("inf"), [1.0], {}, {"a": None}, {"a": "x"}, 1j]
)
def test_everything_else_is_refused(bad):
    with pytest.raises(GraderError):
        as_score(bad)


def test_async_rewards_run_together_and_each_under_its_limit():
    import asyncio
    import time

    @reward()
    async def slow(scored: Scored) -> float:
        await asyncio.sleep(60 if scored.content == "hang" else 0.2)
        return 1.0

    began = time.monotonic()
    found = verdicts(slow, ["1"] * 8 + ["hang"], timeout_s=1.0)
    assert time.monotonic() - began < 3
    assert [v.outcome for v in found] == [Outcome.SCORED] * 8 + [Outcome.TIMED_OUT]


def test_a_group_reward_compares():
    @reward(scope="group")
    def shortest(group: list[Scored]) -> list[float]:
        least = min(len(s.content) for s in group)
        return [float(len(s.content) == least) for s in group]

    assert values(shortest, ["abc", "a", "b"]) == [0.0, 1.0, 1.0]


def test_a_judge_that_fails_is_told_from_a_grader_that_fails():
    @reward()
    def asks(scored: Scored) -> float:
        raise JudgeError("it answered prose")

    @reward()
    def breaks(scored: Scored) -> float:
        return 1 / 0

    assert [v.outcome for v in verdicts(asks, ["1"])] == [Outcome.JUDGE_FAILED]
    (found,) = verdicts(breaks, ["1"])
    assert found.outcome is Outcome.GRADER_FAILED
    assert "ZeroDivisionError" in found.explanation
    assert "test_reward_api.py" in found.explanation


def test_a_function_sees_channels_tools_and_the_whole_trajectory():
    problem = make_problem(budget_tokens=5)
    trajectory = make_trajectory(problem, 0, "8", think="why")
    view = scored_view(problem, trajectory, RENDERER)
    assert (view.content, view.reasoning, view.question) == ("8", "why", "3+5=")
    assert view.thinking_tokens == trajectory.channel_tokens(Channel.THINK) == 3
    assert view.sampled_tokens == trajectory.sampled_tokens
    assert view.problem.budget_tokens == 5


def test_turns_are_divided_by_observations():
    problem = make_problem()
    first, second = make_trajectory(problem, 0, "one"), make_trajectory(problem, 0, "two")
    observation = Segment(Author.ENVIRONMENT, Channel.OBSERVATION, [5, 6, 7])
    first.segments = [*first.segments, observation, *second.segments]
    assert [turn.content for turn in turns_of(first, RENDERER)] == ["one", "two"]
    assert scored_view(problem, first, RENDERER).content == "two"


def test_arguments_come_from_the_problem_and_the_config_which_wins():
    worker = RewardWorker(
        RewardConfig(parts=(RewardPart(arguments={"case_sensitive": False}), RewardPart(reward="numeric"))),
        RENDERER,
    )
    try:
        (got,) = worker.score(make_group(["abc"], make_problem("p", {"name": "exact", "answer": "ABC"})))
        assert got.outcome is Outcome.GRADER_FAILED  # 'ABC' is no number: the other part had its answer too
        assert got.components == {"problem": 1.0}
    finally:
        worker.close()


def test_wrong_arguments_are_named_with_the_nearest():
    found = get_reward("exact")
    with pytest.raises(UserError, match="takes no 'case_sensitiv'; did you mean 'case_sensitive'"):
        found.bind({"answer": "1", "case_sensitiv": True})
    with pytest.raises(UserError, match="needs 'answer'"):
        found.bind({})
    assert get_reward("repetition").bind({"answer": "1"}) == {}


OWN = """
from rewards import reward

def bare(scored, bonus=0.0):
    return 0.25 + bonus

@reward(name="{name}")
def registered(scored):
    return 0.5
"""


def test_rewards_are_found_by_file_by_dotted_path_by_module_and_by_entry_point(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN.format(name="from_module"))
    file = tmp_path / "plain.py"
    file.write_text(OWN.format(name="from_file"))
    monkeypatch.syspath_prepend(tmp_path)
    assert get_reward(f"{file}:bare").name == f"{file}:bare"
    assert get_reward(f"{file}:registered").name == "from_file"
    assert get_reward("own_rewards:registered").name == "from_module"
    assert get_reward("own_rewards.bare").function(None) == 0.25
    load_modules(["own_rewards"])
    assert get_reward("from_module").function(None) == 0.5
    folder = tmp_path / "installed-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[k3rl.rewards]\nby_entry = own_rewards:bare\n")
    importlib.invalidate_caches()
    assert get_reward("by_entry").function(None) == 0.25
    for name, says in [
        ("exakt", "did you mean 'exact'"),
        (f"{file}:bear", "did you mean 'bare'"),
        ("own_reward:bare", "no module"),
        (f"{tmp_path}/none.py:bare", "there is no Python file"),
        ("own_rewards:__name__", "not a function"),
    ]:
        with pytest.raises(UserError, match=says):
            get_reward(name)
    sys.modules.pop("own_rewards")


@pytest.mark.parametrize("how", ["file", "module", "name"])
def test_however_it_is_found_it_is_found_in_its_own_process_too(tmp_path, monkeypatch, how):
    file = tmp_path / f"far_{how}.py"
    file.write_text(OWN.format(name=f"far_name_{how}"))
    monkeypatch.syspath_prepend(tmp_path)
    name = {"file": f"{file}:bare", "module": f"far_{how}:bare", "name": f"far_name_{how}"}[how]
    config = RewardConfig(parts=(RewardPart(reward=name, label="own"),), modules=(str(file),), retries=0)
    worker = RewardWorker(config, RENDERER)
    try:
        (got,) = worker.score(make_group(["1"]))
        assert got.total == (0.5 if how == "name" else 0.25), got.explanation
    finally:
        worker.close()


def test_a_name_that_two_rewards_claim_is_refused_and_their_paths_are_not(tmp_path):
    for name, value in (("a", "0.5"), ("b", "0.75")):
        (tmp_path / f"{name}.py").write_text(OWN.format(name="twice").replace("0.5", value))
        load_modules([str(tmp_path / f"{name}.py")])
    with pytest.raises(UserError, match="several rewards are called 'twice'"):
        get_reward("twice")
    for name, value in (("a", 0.5), ("b", 0.75)):
        assert get_reward(f"{tmp_path}/{name}.py:registered").function(None) == value


def test_a_file_that_was_edited_replaces_its_own_rewards(tmp_path):
    for value in ("0.5", "0.75"):
        (tmp_path / "a.py").write_text(OWN.format(name="edited").replace("0.5", value))
        load_modules([str(tmp_path / "a.py")])
    assert get_reward("edited").function(None) == 0.75


def test_a_built_in_name_is_not_taken_over_silently(tmp_path):
    (tmp_path / "a.py").write_text(OWN.format(name="numeric"))
    load_modules([str(tmp_path / "a.py")])
    with pytest.raises(UserError, match="several rewards are called 'numeric'"):
        get_reward("numeric")


def test_labels_are_the_last_part_of_a_path_and_must_differ():
    names = ["math", "a/b.py:mine", "pkg.module:mine", "http://127.0.0.1:8900/exact", "problem"]
    assert [RewardPart(reward=n).key for n in names] == ["math", "mine", "mine", "exact", "problem"]
    with pytest.raises(ValidationError, match="one label"):
        RewardConfig(parts=(RewardPart(reward="a.py:mine"), RewardPart(reward="b.py:mine")))
    with pytest.raises(ValidationError, match="not another part"):
        RewardConfig(parts=(RewardPart(requires={"form": 1.0}),))
    with pytest.raises(ValidationError, match="not a part"):
        RewardConfig(replacements=(Replacement(when="form", below=1, total=0),))


def test_sums_gates_clips_and_replacements_on_random_configs():
    """Against the formula of `rewards.compose`, written again."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        labels = ["a", "b", "c"][: rng.randint(1, 3)]
        parts = []
        for label in labels:
            others = [x for x in labels if x != label]
            gate = {rng.choice(others): rng.uniform(-1, 1)} if others and rng.random() < 0.5 else {}
            clip = (-0.5, 0.5) if rng.random() < 0.3 else None
            weight = rng.choice([0.0, 1.0, 0.3, -2.0])
            parts.append(RewardPart(reward="exact", label=label, weight=weight, clip=clip, requires=gate))
        rules = (Replacement(when=rng.choice(labels), below=-0.7, total=-3.0),) if rng.random() < 0.4 else ()
        bounds = (-1.0, 1.0) if rng.random() < 0.3 else None
        config = RewardConfig(parts=tuple(parts), replacements=rules, clip=bounds)
        drawn = {label: rng.uniform(-1, 1) for label in labels}
        expected = 0.0
        for part in parts:
            value = drawn[part.key] if part.clip is None else max(-0.5, min(0.5, drawn[part.key]))
            if all(drawn[gate] >= least for gate, least in part.requires.items()):
                expected += part.weight * value
        if bounds:
            expected = max(-1.0, min(1.0, expected))
        if rules and drawn[rules[0].when] < -0.7:
            expected = -3.0
        got = combine(config, {k: Verdict(Outcome.SCORED, Score(v)) for k, v in drawn.items()})
        assert got.total == pytest.approx(expected)
        assert got.components == pytest.approx(drawn)


def test_a_part_without_weight_may_fail_unless_something_looks_at_it():
    failed = Verdict(Outcome.TIMED_OUT, explanation="late")
    good = Verdict(Outcome.SCORED, Score(1.0))
    parts = (RewardPart(reward="exact", label="a"), RewardPart(reward="exact", label="b", weight=0))
    got = combine(RewardConfig(parts=parts), {"a": good, "b": failed})
    assert (got.total, got.components, got.explanation) == (1.0, {"a": 1.0}, "b: late")
    gated = (RewardPart(reward="exact", label="a", requires={"b": 1}), parts[1])
    got = combine(RewardConfig(parts=gated), {"a": good, "b": failed})
    assert (got.total, got.outcome) == (None, Outcome.TIMED_OUT)


def test_equal_answers_are_judged_once(tmp_path):
    file = tmp_path / "counts.py"
    file.write_text(
        "from rewards import reward\nCALLS = []\n"
        "@reward(name='counted', depends='content', deterministic=True)\n"
        "def counted(scored):\n    CALLS.append(1)\n    return float(len(CALLS))\n"
    )
    config = RewardConfig(parts=(RewardPart(reward=f"{file}:counted"),), processes=1)
    worker = RewardWorker(config, RENDERER)
    try:
        first = [r.total for r in worker.score(make_group(["a", "a", "b"]))]
        again = [r.total for r in worker.score(make_group(["b", "a"]))]
        other = [r.total for r in worker.score(make_group(["a"], make_problem("another")))]
        assert (first, again, other) == ([1.0, 1.0, 2.0], [2.0, 1.0], [3.0])
        assert worker.metrics()["cache_hits"] == 3
    finally:
        worker.close()


SANDBOXED = """
from rewards import reward

@reward(sandbox=True)
def runs(scored, sandbox):
    before = sandbox.exec("cat /tmp/mark 2>/dev/null").stdout
    sandbox.write_file("/tmp/mark", scored.content)
    said = sandbox.exec(["python3", "-c", scored.content]).stdout.strip()
    return {"said": float(said), "dirty": float(bool(before))}
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_reward_may_ask_for_a_sandbox_and_gets_a_fresh_one_each_time(tmp_path):
    file = tmp_path / "boxed.py"
    file.write_text(SANDBOXED)
    worker = RewardWorker(RewardConfig(parts=(RewardPart(reward=f"{file}:runs"),), retries=0), RENDERER)
    try:
        got = worker.score(make_group(["print(1 + 1)", "print(7)", "print(len(open('/tmp/mark').read()))"]))
    finally:
        worker.close()
    assert [r.total for r in got] == [2.0, 7.0, 36.0], got
    with pytest.raises(UserError, match="plain function"):

        @reward(name="not_so", sandbox=True)
        async def not_so(scored: Scored, sandbox) -> float:
            return 0.0


def test_a_group_whose_trajectories_all_failed_calls_nothing(tmp_path):
    file = tmp_path / "never.py"
    file.write_text(
        "from rewards import reward\n@reward(scope='group')\ndef never(group):\n    raise ValueError\n"
    )
    worker = RewardWorker(RewardConfig(parts=(RewardPart(reward=f"{file}:never"),)), RENDERER)
    try:
        assert worker.score(Group(make_problem(), 0, [])) == []
        group = make_group(["1", "2"])
        for trajectory in group.trajectories:
            trajectory.status = Status.FAILED
        assert [r.outcome for r in worker.score(group)] == [Outcome.SKIPPED] * 2
    finally:
        worker.close()


def test_what_a_problem_lacks_is_said_before_anything_runs():
    good = make_problem("good")
    check_rewards(RewardConfig(), [good, good])
    for problem, config, says in [
        (
            make_problem("p", {"name": "exakt", "answer": "1"}),
            RewardConfig(),
            "problem 'p': .*did you mean 'exact'",
        ),
        (make_problem("p", {"name": "exact"}), RewardConfig(), "problem 'p': .*needs 'answer'"),
        (make_problem("p", {"name": "exact", "answer": "1", "case": 1}), RewardConfig(), "takes no 'case'"),
        (make_problem("p", {"name": ""}), RewardConfig(), "problem 'p' names no reward"),
        (
            good,
            RewardConfig(parts=(RewardPart(reward="json_schema", arguments={"shema": {}}),)),
            "did you mean 'schema'",
        ),
    ]:
        with pytest.raises(UserError, match=says):
            check_rewards(config, [good, problem])
