"""QAT: which matrices, which values, which gradients; trainer and engine hold the same numbers."""

import copy

import pytest
import torch

from k3rl.chat import load_renderer
from k3rl.config.load import load_job
from k3rl.errors import UserError
from k3rl.models import ModelConfig, build_model, load_model
from k3rl.quant import fake_quantise
from k3rl.quant.config import QatConfig
from k3rl.quant.qat import prepare, quantised_weights, statistics
from rollout.engine import Generation, SamplingParams
from rollout.native import NativeEngine

WIDE = (
    "experts",
    "*.mlp.*_proj",
    "*.shared_experts.*_proj",
    "*.routed_expert_*_proj",
    "*.self_attn.[qgo]_proj",
)
NANO = ModelConfig(overrides={"num_hidden_layers": 2, "attn_res_block_size": 1})


def packed(seed: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 500, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.tensor([0, *torch.tensor(lengths).cumsum(0)])


def test_only_the_routed_experts_are_quantised_by_default_and_names_stay():
    model = build_model(NANO, seed=0)
    before = [n for n, _ in model.named_weights()]
    assert all("experts" in name for name in prepare(model, QatConfig()))
    assert [n for n, _ in model.named_weights()] == before
    names = {n for n, _, _ in quantised_weights(model)}
    assert names
    assert all(n.rsplit(".", 1)[1] in ("w1", "w2", "w3") for n in names)


def test_the_forward_pass_is_that_of_a_model_with_rounded_weights():
    model = build_model(NANO, seed=0)
    rounded = copy.deepcopy(model)
    prepare(model, QatConfig())
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if ".experts.w" in name:
                parameter.copy_(fake_quantise(parameter))
    ids, cuts = packed(1, [40, 300])
    with torch.no_grad():
        assert torch.equal(model(ids, cuts), rounded(ids, cuts))
        assert not torch.equal(model(ids, cuts), build_model(NANO, seed=0)(ids, cuts))


def test_gradients_reach_the_master_weights_unchanged():
    model = build_model(NANO, seed=0)
    rounded = copy.deepcopy(model)
    prepare(model, QatConfig())
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if ".experts.w" in name:
                parameter.copy_(fake_quantise(parameter))
    ids, cuts = packed(2, [64])
    for each in (model, rounded):
        each(ids, cuts).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), rounded.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_kept_values_follow_the_weights():
    model = build_model(NANO, seed=0)
    prepare(model, QatConfig())
    ids, cuts = packed(3, [20])
    with torch.no_grad():
        first = model(ids, cuts)
        model.load_named_weights((n, w * 1.7) for n, w in model.named_weights())
        fresh = build_model(NANO, seed=0)
        fresh.load_named_weights((n, w * 1.7) for n, w in fresh.named_weights())
        prepare(fresh, QatConfig())
        assert torch.equal(model(ids, cuts), fresh(ids, cuts))
        assert not torch.equal(model(ids, cuts), first)


@pytest.mark.parametrize("targets", [("experts",), WIDE])
def test_engine_and_trainer_agree_and_would_not_without_quantising_both(targets):
    config = ModelConfig(qat=QatConfig(targets=targets))
    renderer = load_renderer("k3-nano")
    gaps = {}
    for name, engine_model in {"same": config, "without": config.model_copy(update={"qat": None})}.items():
        engine = NativeEngine(
            load_model(engine_model, seed=0).requires_grad_(False),
            max_slots=16,
            max_context=256,
            eos_token_ids=renderer.stop_token_ids,
        )
        prompts = [packed(i, [5 + 7 * i])[0].tolist() for i in range(16)]
        generations = [Generation(str(i), p, SamplingParams(max_tokens=64), i) for i, p in enumerate(prompts)]
        engine.submit(generations)
        while engine.pending():
            engine.step()
        trainer = load_model(config, seed=0)
        worst = 0.0
        for g in generations:
            ids = torch.tensor(g.context_ids + g.token_ids)
            with torch.no_grad():
                logits = trainer.logits(trainer(ids, torch.tensor([0, len(ids)])))
            start = len(g.context_ids)
            ours = logits[start - 1 : -1].log_softmax(-1).gather(-1, ids[start:, None])[:, 0]
            worst = max(worst, float((ours - torch.tensor(g.logprobs)).abs().max()))
        gaps[name] = worst
    print(gaps)
    assert gaps["same"] < 1e-5
    assert gaps["without"] > 100 * gaps["same"]


def test_activations_are_quantised_where_asked():
    ids, cuts = packed(4, [30])
    with torch.no_grad():
        weights_only = load_model(ModelConfig(qat=QatConfig()), seed=0)(ids, cuts)
        both = load_model(ModelConfig(qat=QatConfig(activations="mxfp8")), seed=0)(ids, cuts)
    assert 0 < (both - weights_only).norm() / weights_only.norm() < 0.5  # some tokens choose other experts


def test_linear_modules_of_a_dense_model_by_pattern():
    model = torch.nn.ModuleDict({"mlp": torch.nn.Linear(64, 32), "head": torch.nn.Linear(64, 8)})
    original = model["mlp"].weight.detach().clone()
    assert prepare(model, QatConfig(targets=("mlp",))) == ["mlp"]
    x = torch.randn(5, 64)
    expected = torch.nn.functional.linear(x, fake_quantise(original), model["mlp"].bias)
    assert torch.equal(model["mlp"](x), expected)
    assert list(model.state_dict()) == ["mlp.weight", "mlp.bias", "head.weight", "head.bias"]
    with pytest.raises(UserError, match="'attn' matches no linear module"):
        prepare(model, QatConfig(targets=("attn",)))
    with pytest.raises(UserError, match="has 40 inputs"):
        prepare(torch.nn.ModuleDict({"odd": torch.nn.Linear(40, 8)}), QatConfig(targets=("odd",)))


@pytest.mark.parametrize("target", ["lm_head", "*.kv_b_proj", "*.self_attn.*", "*_res.proj"])
def test_matrices_that_are_also_read_elsewhere_are_refused(target):
    with pytest.raises(UserError, match="also read outside its linear map"):
        prepare(build_model(ModelConfig(), seed=0), QatConfig(targets=(target,)))


def test_every_job_of_the_recipe_computes_in_the_same_scheme():
    jobs = load_job("configs/qat_nano.yaml").jobs
    models = [jobs["sft"].model, jobs["rl"].model, *jobs["evaluate"].models.values()]
    assert models[0].qat.targets[0] == "experts"
    assert len(models[0].qat.targets) > 1
    assert all(m.qat == models[0].qat for m in models)
    # None: as the model was trained
    assert (jobs["export"].format, jobs["export"].rule, jobs["export"].targets) == ("mxfp4", None, ())
    for part in ("evaluation", "engine", "rewards"):
        assert getattr(jobs["served"], part) == getattr(jobs["evaluate"], part)


def test_statistics_are_those_of_the_definition():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 32)})
    prepare(model, QatConfig(targets=("a",)))
    weight = model["a"].weight.detach().double()
    rounded = fake_quantise(model["a"].weight.detach()).double()
    numbers = {name: total / count for name, (total, count) in statistics(model).items()}
    assert numbers["qat/relative_error"] == pytest.approx(
        float((rounded - weight).square().sum() / weight.square().sum())
    )
    assert numbers["qat/saturated_share"] == 0  # the ceil rule never clips
    assert numbers["qat/zero_share"] == pytest.approx(float((rounded == 0).double().mean()))
    assert statistics(torch.nn.Linear(64, 8)) == {}
