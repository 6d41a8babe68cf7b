"""Divergences over whole or truncated distributions: values and gradients are the definitions', teachers give the
distributions they have, and the trainer minimises what it says."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from distill.teachers import Teachers
from k3rl.algorithms.divergence import DivergenceConfig, divergence
from k3rl.config.trainer import TrainerConfig
from k3rl.errors import RunError
from k3rl.models import ModelConfig, build_model, load_model, save_model
from k3rl.trainer import TrainerWorker
from k3rl.types import Author, Channel, Segment, Trajectory

NANO = ModelConfig(overrides={"num_hidden_layers": 2, "attn_res_block_size": 1})
KINDS = ("reverse_kl", "forward_kl", "jsd")


def pair(tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed := int(torch.randint(1000, ())))
    print("seed", seed)
    student = torch.randn(tokens, vocabulary, dtype=torch.float64, requires_grad=True)
    return student, torch.randn(tokens, vocabulary, dtype=torch.float64).log_softmax(-1)


def reference(p: torch.Tensor, q: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    """By torch's own KL, from probabilities."""
    kl = lambda a, b: F.kl_div(b.log(), a, reduction="none").sum(1)  # noqa: E731  KL(a || b)
    mix = beta * q + (1 - beta) * p
    return {
        "reverse_kl": lambda: kl(p, q),
        "forward_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(q, mix) + (1 - beta) * kl(p, mix),
    }[kind]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_over_the_whole_vocabulary_value_and_gradient_are_the_definition(kind, beta):
    student, teacher = pair(5, 11)
    got = divergence(student.log_softmax(-1), teacher, kind, beta)
    expected = reference(student.softmax(-1), teacher.exp(), kind, beta)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_over_the_top_k_the_teacher_is_stationary_and_nothing_else_nearby_is_lower(kind):
    _, teacher = pair(4, 12)
    top, ids = teacher.topk(3, dim=1)
    student = teacher.clone().requires_grad_()
    value = divergence(student.log_softmax(-1).gather(1, ids), top, kind)
    torch.testing.assert_close(value, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    gradient = torch.autograd.grad(value.sum(), student)[0]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)
    for _ in range(10):
        other = (teacher + 0.3 * torch.randn_like(teacher)).log_softmax(-1).gather(1, ids)
        assert (divergence(other, top, kind) > 0).all()


def test_without_the_correction_the_top_k_sum_would_push_mass_out():
    _, teacher = pair(1, 12)
    top, ids = teacher.topk(3, dim=1)
    student = teacher.clone().requires_grad_()
    p = student.log_softmax(-1).gather(1, ids)
    gradient = torch.autograd.grad((p.exp() * (p - top)).sum(), student)[0]
    assert (gradient.gather(1, ids) > 1e-3).all()  # descent lowers what the teacher likes best


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_model(build_model(NANO, seed=seed), folder / str(seed))
    return [ModelConfig(path=str(folder / str(seed))) for seed in (0, 1)]


def test_a_teacher_gives_its_likeliest_ids(models):
    teachers, ids = Teachers(models[1:], "cpu", 256), list(range(20, 60))
    own = teachers.score([(0, ids, 7)])[0]
    for k in (3, 0):
        (found,) = teachers.distributions([(0, ids, 7)], k)
        assert found.logprobs == pytest.approx(own.logprobs, abs=1e-5)
        assert found.ids.shape == found.top.shape == (33, k or load_model(models[1]).vocab_size)
        assert (np.diff(found.top, axis=1) <= 0).all() or k == 0
    np.testing.assert_allclose(np.exp(found.top).sum(1), 1, rtol=1e-5)
    picked = found.top[np.arange(33), ids[7:]]
    assert picked.tolist() == pytest.approx(own.logprobs, abs=1e-5)


def taught(teacher: ModelConfig, k: int) -> list[Trajectory]:
    made = []
    for draw in range(2):
        t = Trajectory(f"p{draw}", draw, 0, "general", None, [5, 6, 7 + draw])
        response = list(range(30 + draw, 42 + 3 * draw))
        t.segments = [Segment(Author.MODEL, Channel.RESPONSE, response, [-1.0] * len(response), 0)]
        (found,) = Teachers([teacher], "cpu", 256).distributions([(0, [*t.prompt_ids, *response], 3)], k)
        t.teacher_top, t.token_advantages = (found.ids, found.top), [1.0 + draw] * len(response)
        made.append(t)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [4, 0])
def test_the_trainer_minimises_the_divergence(models, kind, k):
    """The step's loss, and its gradient's norm, are those of a direct computation on the model's logits."""
    made = taught(models[1], k)
    objective = DivergenceConfig(divergence=kind, token_advantages=True)
    worker = TrainerWorker(models[0], TrainerConfig(objective=objective, grad_clip=0.0), device="cpu")
    model = load_model(models[0])
    total, count = 0.0, sum(t.sampled_tokens for t in made)
    for t in made:
        ids = torch.tensor([*t.prompt_ids, *t.token_ids])
        logits = model.logits(model(ids, torch.tensor([0, len(ids)]))[2:-1])
        chosen, top = (torch.from_numpy(np.array(a)) for a in t.teacher_top)
        value = divergence(logits.log_softmax(-1).gather(1, chosen.long()), top, kind)
        total = total + (1.0 + t.draw) * value.sum() / count
    total.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    found = worker.step(made)
    assert found["train/loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert found["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert found[f"divergence/{kind}"] > 0


def test_remote_teachers_give_top_k_too(models):
    from teacher_server import TeacherServer

    from distill.remote import RemoteScorer
    from k3rl.chat import load_renderer
    from k3rl.config.distill import RemoteTeacher

    server = TeacherServer(models[1])
    try:
        far = RemoteScorer(RemoteTeacher(url=server.url, model="teacher"), "far", load_renderer("k3-nano"))
        ids = list(range(20, 50))
        (near,) = Teachers(models[1:], "cpu", 256).distributions([(0, ids, 4)], 5)
        found = far.submit(ids, 4, 5).result()
        np.testing.assert_array_equal(found.ids, near.ids)
        np.testing.assert_allclose(found.top, near.top, atol=1e-5)
        server.fault = "few"
        with pytest.raises(RunError, match=r"gave [12] of the 5 likeliest tokens; vLLM needs --max-logprobs"):
            far.submit(ids, 4, 5).result()
    finally:
        server.stop()
