"""Distillation: the expected gradient is reverse KL's, alignment is exact, routing covers or says what it lacks."""

import itertools
import random

import pytest
import torch

from distill.routing import Routing, teacher_prompt
from distill.teachers import Teachers
from distill.token_rewards import Opinion, assign, metrics, weights
from k3rl.chat import load_renderer
from k3rl.config.distill import TeacherConfig, TokenRewardConfig
from k3rl.errors import UserError
from k3rl.models import ModelConfig, build_model, save_model
from k3rl.types import Author, Channel, Effort, Problem, Segment, Trajectory
from rollout.native import NativeEngine

RENDERER = load_renderer("k3-nano")
NANO = ModelConfig(overrides={"num_hidden_layers": 2, "attn_res_block_size": 1})


def trajectory(
    draw: int, tokens: list[int], domain: str = "general", effort: Effort | None = None
) -> Trajectory:
    t = Trajectory(f"p{draw}", draw, 0, domain, effort, [5, 6, 7])
    t.segments = [Segment(Author.MODEL, Channel.RESPONSE, tokens, [-1.0] * len(tokens), 0)]
    return t


def problem(domain: str = "general", effort: Effort | None = None, **metadata) -> Problem:
    message = {"role": "user", "content": "QW>3"}
    return Problem("p", domain, [message], {"name": "exact"}, effort=effort, metadata=metadata)


def test_the_expected_gradient_is_that_of_reverse_kl():
    """Two tokens over a vocabulary of three, all nine responses, float64; the second token depends on the first.
    Token rewards without clipping give the gradient of the KL of each next-token distribution, under the student's
    own prefixes: what on-policy distillation minimises."""
    torch.manual_seed(seed := int(torch.randint(1000, ())))
    print("seed", seed)
    V = 3
    student = [torch.randn(1, V, dtype=torch.float64), torch.randn(V, V, dtype=torch.float64)]
    teacher = [torch.randn(1, V, dtype=torch.float64), torch.randn(V, V, dtype=torch.float64)]
    for p in student:
        p.requires_grad_()

    def logp(table, y):
        first = table[0].log_softmax(-1)[0, y[0]]
        return torch.stack([first, table[1].log_softmax(-1)[y[0], y[1]]])

    surrogate = torch.zeros((), dtype=torch.float64)
    for y in itertools.product(range(V), repeat=2):
        ours, theirs = logp(student, y), logp(teacher, y)
        t = trajectory(0, list(y))
        opinion = Opinion(t, 0, theirs.tolist(), ours.detach().tolist())
        assign([opinion], TokenRewardConfig(r_max=1e9, weighting="token"))
        probability = ours.sum().exp().detach()
        surrogate = (
            surrogate - probability * (torch.tensor(t.token_advantages, dtype=torch.float64) * ours).sum()
        )
    got = torch.autograd.grad(surrogate, student)

    first, second = (p.log_softmax(-1) for p in student)
    kl_first = (first.exp() * (first - teacher[0].log_softmax(-1))).sum()
    kl_second = (second.exp() * (second - teacher[1].log_softmax(-1))).sum(-1)
    visited = first.exp().detach()[0]
    expected = torch.autograd.grad(kl_first + (visited * kl_second).sum(), student)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_sampled_gradients_converge_to_that_of_reverse_kl_and_clipping_biases_them():
    """One position over five tokens: the mean of sampled token rewards times the score function, against autograd."""
    torch.manual_seed(11)
    student = torch.randn(5, dtype=torch.float64, requires_grad=True)
    teacher = (2 * torch.randn(5, dtype=torch.float64)).log_softmax(-1)
    logp = student.log_softmax(-1)
    exact = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), student, retain_graph=True)[0]

    def estimate(count: int, r_max: float) -> torch.Tensor:
        draws = torch.multinomial(logp.detach().exp(), count, replacement=True)
        t = trajectory(0, draws.tolist())
        assign(
            [Opinion(t, 0, teacher[draws].tolist(), logp.detach()[draws].tolist())],
            TokenRewardConfig(r_max=r_max, weighting="token"),
        )
        advantages = torch.tensor(t.token_advantages, dtype=torch.float64)
        loss = -(advantages * logp[draws]).mean()
        return torch.autograd.grad(loss, student, retain_graph=True)[0]

    errors = [float((estimate(n, 1e9) - exact).norm() / exact.norm()) for n in (100, 400_000)]
    assert errors[1] < 0.02 < errors[0]
    assert float((estimate(400_000, 0.1) - exact).norm() / exact.norm()) > 0.2


def test_clipping_and_weighting_are_those_of_the_definition():
    rng = random.Random(3)
    cells = [
        ("coding", Effort.MAX, 50),
        ("coding", Effort.LOW, 3),
        ("agent", Effort.LOW, 11),
        ("coding", Effort.LOW, 8),
    ]
    made = [trajectory(i, [9] * n, d, e) for i, (d, e, n) in enumerate(cells)]
    opinions = [
        Opinion(t, 0, [rng.uniform(-9, 0) for _ in t.token_ids], [rng.uniform(-2, 0) for _ in t.token_ids])
        for t in made
    ]
    config = TokenRewardConfig(r_max=2.0, weighting="cell")
    assign(opinions, config)
    scale = weights(made, config)
    for o, w in zip(opinions, scale, strict=True):
        clipped = [
            max(-2.0, min(2.0, t - s)) for t, s in zip(o.teacher_logprobs, o.student_logprobs, strict=True)
        ]
        assert o.trajectory.token_advantages == pytest.approx([w * r for r in clipped])
    tokens = {}
    for t, w in zip(made, scale, strict=True):
        tokens[t.domain, t.effort] = tokens.get((t.domain, t.effort), 0) + w * t.sampled_tokens
    assert len({round(v, 9) for v in tokens.values()}) == 1  # every cell weighs the same
    for kind in ("token", "sequence", "cell"):
        scale = weights(made, TokenRewardConfig(weighting=kind))
        total = sum(w * t.sampled_tokens for w, t in zip(scale, made, strict=True))
        assert total == pytest.approx(sum(t.sampled_tokens for t in made))
    config = TokenRewardConfig(r_max=2.0, cell_weights={"coding.max": 3, "agent": 0.5})
    scale = weights(made, config)  # cells: coding.max 3, coding.low 1, agent.low 0.5
    tokens = [w * t.sampled_tokens for w, t in zip(scale, made, strict=True)]
    assert tokens[0] / (tokens[1] + tokens[3]) == pytest.approx(3)
    assert tokens[2] / (tokens[1] + tokens[3]) == pytest.approx(0.5)
    assert sum(tokens) == pytest.approx(sum(t.sampled_tokens for t in made))
    found = metrics(opinions, ["expert"], config)
    gaps = [g for o in opinions for g in o.gaps]
    assert found["teacher/kl"] == pytest.approx(-sum(gaps) / len(gaps))
    assert found["teacher/clipped_share"] == pytest.approx(sum(abs(g) > 2 for g in gaps) / len(gaps))
    pull = [w * sum(min(abs(g), 2.0) for g in o.gaps) for o, w in zip(opinions, scale, strict=True)]
    assert found["teacher/gradient_share/cell/coding.low"] == pytest.approx((pull[1] + pull[3]) / sum(pull))
    for kind in ("gradient_share", "token_share"):
        assert sum(v for k, v in found.items() if k.startswith(f"teacher/{kind}")) == pytest.approx(1)
    assert found["teacher/token_share/cell/coding.max"] == pytest.approx(50 / 72)


def test_a_missing_or_extra_logprob_is_never_shifted_to_a_neighbour():
    with pytest.raises(
        ValueError, match="2 log-probs of the teacher and 3 of the student for 3 sampled tokens"
    ):
        Opinion(trajectory(0, [1, 2, 3]), 0, [-1.0, -1.0], [-1.0] * 3)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    save_model(build_model(NANO, seed=0), folder)
    return ModelConfig(path=str(folder))


def test_a_teacher_that_is_the_student_gives_exactly_zero_and_a_shift_by_one_does_not(student):
    from k3rl.models import load_model

    rng = random.Random(0)
    prompts = [
        RENDERER.encode_prompt([{"role": "user", "content": f"QW>{i}"}], (), effort)
        for i, effort in enumerate([None, Effort.LOW, Effort.HIGH, Effort.MAX])
    ]
    responses = [[rng.randrange(10, 500) for _ in range(rng.randint(1, 60))] for _ in prompts]
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    starts = [len(p) for p in prompts]
    engine = NativeEngine(load_model(student), max_slots=1, max_context=256, eos_token_ids=())
    ours = engine.score(sequences, starts)
    teachers = Teachers([student], "cpu", 256)
    theirs = teachers.score([(0, s, n) for s, n in zip(sequences, starts, strict=True)])
    assert [t.logprobs for t in theirs] == ours
    shifted = teachers.score(
        [(0, s, n) for s, n in zip([[s[0], *s] for s in sequences], starts, strict=True)]
    )
    assert all(a.logprobs[: len(b)] != b for a, b in zip(shifted, ours, strict=True))


def test_prompt_forms_end_with_the_same_generation_prompt(student):
    p = problem(effort=Effort.LOW)
    own = teacher_prompt(RENDERER, p, TeacherConfig(model=student), True)
    none = teacher_prompt(RENDERER, p, TeacherConfig(model=student, prompt_effort="none"), True)
    fixed = teacher_prompt(RENDERER, p, TeacherConfig(model=student, prompt_effort="max"), True)
    assert own == RENDERER.encode_prompt(p.messages, (), Effort.LOW)
    assert none == RENDERER.encode_prompt(p.messages, (), None)
    assert fixed == RENDERER.encode_prompt(p.messages, (), Effort.MAX)
    assert len(none) < len(own)
    assert own[-8:] == none[-8:] == fixed[-8:]


def test_routing_by_domain_and_effort_with_a_fallback_and_the_problems_own_word(student):
    other = ModelConfig(path="elsewhere")
    routing = Routing(
        [
            TeacherConfig(name="coder", model=student, domains=("coding",), efforts=(Effort.MAX,)),
            TeacherConfig(name="brief", model=other, efforts=(Effort.LOW,)),
            TeacherConfig(name="rest", model=student),
        ]
    )
    assert routing.teacher_of(problem("coding", Effort.MAX)) == 0
    assert routing.teacher_of(problem("coding", Effort.LOW)) == 1
    assert routing.teacher_of(problem("agent", Effort.MAX)) == 2
    assert routing.teacher_of(problem("coding", Effort.MAX, teacher="brief")) == 1
    assert routing.weights == [0, 1, 0]  # one checkpoint, loaded once
    with pytest.raises(UserError, match="no teacher 'brif'; did you mean 'brief'"):
        routing.check([problem(teacher="brif")])
    with pytest.raises(UserError, match="nobody teaches domain 'agent' at effort 'max'"):
        Routing(routing.teachers[:2]).check([problem("agent", Effort.MAX)])


def test_many_teachers_are_asked_each_for_its_own(student, tmp_path):
    from k3rl.models import load_model

    save_model(build_model(NANO, seed=9), tmp_path / "other")
    models = [student, ModelConfig(path=str(tmp_path / "other"))]
    rng = random.Random(1)
    requests = [(i % 2, [rng.randrange(3, 500) for _ in range(30)], 10) for i in range(6)]
    got = Teachers(models, "cpu", 256).score(requests)
    for i, model in enumerate(models):
        engine = NativeEngine(load_model(model), max_slots=1, max_context=256, eos_token_ids=())
        mine = [r for r in requests if r[0] == i]
        expected = engine.score([ids for _, ids, _ in mine], [start for _, _, start in mine])
        assert [row.logprobs for row, r in zip(got, requests, strict=True) if r[0] == i] == expected
