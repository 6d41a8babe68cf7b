"""Bad input ends with exit code 2 and one clear sentence, before Ray starts and before anything is written."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import ray
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from k3rl import cli
from k3rl.models import ModelConfig, build_model, save_model
from k3rl.store import RunStore

NANO = Path("k3rl/chat/nano")
JOB = {
    "kind": "rl",
    "model": {"path": "k3-nano"},
    "data": {"type": "callable", "function": "k3rl.data.tasks:keyboard_walk"},
    "steps": 1,
    "rollout": {"groups": 2, "samples": 2, "max_tokens": 8},
}


def exit_code(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["k3rl", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    return exit_.value.code


def refused(tmp_path: Path, capsys, changes: dict, *overrides: str, ran: bool = False) -> str:
    """What a person reads after `k3rl run`."""
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump({**JOB, "runs": str(tmp_path / "runs"), **changes}))
    assert exit_code("run", str(config), *overrides) == 2
    assert not ray.is_initialized()
    if not ran:
        assert not (tmp_path / "runs").exists()
    message = capsys.readouterr().err.strip()
    assert message.startswith("k3rl: ")
    assert "\n" not in message
    return message


@pytest.fixture
def checkpoint(tmp_path):
    save_model(build_model(ModelConfig(), seed=0), tmp_path / "checkpoint", NANO)
    return tmp_path / "checkpoint"


def test_unknown_keys_and_wrong_types(tmp_path, capsys):
    assert "unknown key 'stepz'; did you mean 'steps'" in refused(tmp_path, capsys, {"stepz": 1})
    assert "'steps'" in refused(tmp_path, capsys, {}, "steps=often")


def test_missing_files(tmp_path, capsys):
    message = refused(
        tmp_path, capsys, {"data": {"type": "jsonl", "path": "nowhere.jsonl", "reward": "exact"}}
    )
    assert "nowhere.jsonl" in message
    message = refused(tmp_path, capsys, {"model": {"path": "k3-nanno"}})
    assert "'k3-nanno' is neither a folder nor a preset; did you mean 'k3-nano'" in message


def test_a_data_set_without_the_needed_column_names_file_and_row(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1+1"}) + "\n")
    message = refused(tmp_path, capsys, {"data": {"type": "jsonl", "path": str(rows), "reward": "exact"}})
    assert "rows.jsonl" in message
    assert "line 1" in message
    assert "'prompt'" in message


def test_a_reward_that_does_not_exist(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    message = refused(tmp_path, capsys, {"data": {"type": "jsonl", "path": str(rows), "reward": "exakt"}})
    assert "there is no reward 'exakt'; did you mean 'exact'" in message
    message = refused(tmp_path, capsys, {"rewards": {"parts": [{"reward": "maths"}]}})
    assert "there is no reward 'maths'; did you mean 'math'" in message


def test_a_tokenizer_without_the_structure_tokens(tmp_path, capsys, checkpoint):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|open|>"]
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "<|open|>" in refused(tmp_path, capsys, {"model": {"path": str(checkpoint)}})


def test_a_checkpoint_of_another_model(tmp_path, capsys, checkpoint):
    smaller = build_model(ModelConfig(overrides={"vocab_size": 64}), seed=0)
    save_model(smaller, tmp_path / "small")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / file, tmp_path / "small" / file)
    message = refused(tmp_path, capsys, {"model": {"path": str(tmp_path / "small")}})
    assert "has 64 token ids and its tokenizer 512: they belong to different models" in message


def test_a_run_folder_with_another_config(tmp_path, capsys):
    RunStore.create(tmp_path / "runs" / "job", yaml.safe_dump({**JOB, "steps": 1, "seed": 7})).close()
    assert "holds a run with another config" in refused(tmp_path, capsys, {}, ran=True)


def test_ranks_that_cannot_share_sequences(tmp_path, capsys):
    trainer = {"parallel": {"ranks": 3, "context": 2}}
    message = refused(tmp_path, capsys, {"trainer": trainer})
    assert "3 ranks cannot be divided into groups of 2; ranks must be a multiple of context" in message
    config = LlamaConfig(
        vocab_size=512, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / file, tmp_path / "llama" / file)
    capsys.readouterr()  # what the library says while it writes
    changes = {
        "model": {"path": str(tmp_path / "llama")},
        "trainer": {"parallel": {"ranks": 2, "context": 2}},
    }
    message = refused(tmp_path, capsys, changes)
    assert "llama' cannot share a sequence between ranks, only K3 models can" in message


def test_too_little_memory(tmp_path, capsys):
    model = {"path": "k3-nano", "overrides": {"num_experts": 2_000_000}}
    message = refused(tmp_path, capsys, {"model": model})
    assert "GiB" in message
    assert "free" in message


def test_sampling_that_cannot_be_trained_on(tmp_path, capsys):
    rollout = {**JOB["rollout"], "sampling": {"top_p": 0.9}}
    message = refused(tmp_path, capsys, {"rollout": rollout})
    assert "rollout.sampling.top_p: the trainer cannot reproduce a truncated distribution" in message


def test_routing_that_cannot_be_recorded(tmp_path, capsys):
    def message(model: dict | None = None, **engine) -> str:
        rollout = {**JOB["rollout"], "engine": {"type": "native", "record_routing": True, **engine}}
        return refused(tmp_path, capsys, {"rollout": rollout, "model": model or JOB["model"]})

    found = message(prefix_cache_bytes=1000)
    assert "'rollout.engine" in found
    assert "record_routing and prefix_cache_bytes exclude each other" in found
    assert "record_routing and deterministic exclude each other" in message(deterministic=True)
    assert "record_routing needs type: native; vLLM does not say" in message(type="vllm")
    dense = {"path": "k3-nano", "overrides": {"first_k_dense_replace": 4}}
    assert "rollout.engine.record_routing: 'k3-nano' has no experts" in message(dense)
    config = LlamaConfig(
        vocab_size=512, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / file, tmp_path / "llama" / file)
    capsys.readouterr()  # what the library says while it writes
    assert "llama' has no experts" in message({"path": str(tmp_path / "llama")})
    judge = {"model": {"path": "k3-nano"}, "engine": {"record_routing": True}}
    found = refused(tmp_path, capsys, {"rewards": {"judges": {"one": judge}}})
    assert "'rewards.judges.one.engine': record_routing is for jobs that train" in found
    evaluate = {
        "kind": "evaluate",
        "models": {"one": {"path": "k3-nano"}},
        "evaluation": {"data": JOB["data"]},
        "engine": {"type": "native", "record_routing": True},
    }
    config_file = tmp_path / "evaluate.yaml"
    config_file.write_text(yaml.safe_dump({**evaluate, "runs": str(tmp_path / "runs")}))
    assert exit_code("run", str(config_file)) == 2
    assert "record_routing is for jobs that train on what this engine samples" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context(tmp_path, capsys):
    message = refused(tmp_path, capsys, {"rollout": {**JOB["rollout"], "max_context": 16}})
    assert "the limit is 16" in message


def test_a_pipelines_job_is_named(tmp_path, capsys):
    pipeline = {"kind": "pipeline", "jobs": {"first": {**JOB, "model": {"path": "nothing"}}}}
    config = tmp_path / "pipe.yaml"
    config.write_text(yaml.safe_dump({**pipeline, "runs": str(tmp_path / "runs")}))
    assert exit_code("config", "check", str(config)) == 2
    assert "job 'first': model.path: 'nothing'" in capsys.readouterr().err
