"""Configs: composition, overrides, and one clear sentence for each kind of mistake."""

from pathlib import Path

import pytest
import yaml

from k3rl.config.jobs import EvaluateJob, PipelineJob, RlJob, SftJob
from k3rl.config.load import config_hash, dump_job, job_schema, load_job
from k3rl.errors import UserError

RL = """
kind: rl
data: {type: callable, function: "k3rl.data.tasks:keyboard_walk"}
steps: 3
rollout: {groups: 4, samples: 2, lambda: 0.5}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_becomes_a_job_named_after_it(tmp_path):
    job = load_job(write(tmp_path, "mine.yaml", RL))
    assert isinstance(job, RlJob)
    assert (job.name, job.steps, job.rollout.lambda_, job.seed) == ("mine", 3, 0.5, 0)


def test_extends_merges_mappings_and_the_extending_file_wins(tmp_path):
    write(tmp_path, "base.yaml", RL)
    write(tmp_path, "more.yaml", "rollout: {samples: 8}\ntrainer: {optimizer: {lr: 0.5}}\n")
    job = load_job(
        write(tmp_path, "job.yaml", "extends: [base.yaml, more.yaml]\nsteps: 9\nrollout: {groups: 1}\n")
    )
    assert (job.steps, job.rollout.groups, job.rollout.samples, job.rollout.lambda_) == (9, 1, 8, 0.5)
    assert job.trainer.optimizer.lr == 0.5


def test_overrides_come_last_and_lists_are_replaced(tmp_path):
    path = write(tmp_path, "job.yaml", RL + "rewards: {parts: [{reward: exact}, {reward: regex}]}\n")
    job = load_job(path, ["steps=7", "rollout.lambda=1", "rewards.parts=[{reward: exact}]", "seed=3"])
    assert (job.steps, job.rollout.lambda_, len(job.rewards.parts), job.seed) == (7, 1.0, 1, 3)


def test_the_stored_config_loads_to_the_same_job(tmp_path):
    for config in sorted(Path("configs").glob("*.yaml")):
        job = load_job(config)
        again = load_job(write(tmp_path, "stored.yaml", dump_job(job)))
        assert again == job
        assert config_hash(again) == config_hash(job)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("stepz: 3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("rollout: {sampels: 3}", "unknown key 'rollout.sampels'; did you mean 'samples'?"),
        ("trainer: {optimizer: {lrr: 1}}", "unknown key 'trainer.optimizer.lrr'; did you mean 'lr'?"),
        ("kind: rll", "'kind' cannot be 'rll'; did you mean 'rl'?"),
        ("data: {type: jsnl, path: x}", "'data.type' cannot be 'jsnl'; did you mean 'jsonl'?"),
        ("data: {path: x}", "the key 'data.type' is missing"),
        ("steps: many", "'steps'"),
        ("steps: 0", "'steps'"),
        ("rollout: {groups: 4, samples: 2, lambda: 1.5}", "'rollout.lambda'"),
        ("name: ../up", "a run's name is made of"),
        ("model: {path: [1]}", "'model.path'"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_with_its_place(tmp_path, change, sentence):
    content = {**yaml.safe_load(RL), **yaml.safe_load(change)}
    path = write(tmp_path, "job.yaml", yaml.safe_dump(content))
    with pytest.raises(UserError) as caught:
        load_job(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert sentence in message
    assert "\n" not in message


def test_mistakes_on_the_command_line_are_said_to_be_there(tmp_path):
    path = write(tmp_path, "job.yaml", RL)
    for override, sentence in [
        ("rollout.sampels=3", "the command line: unknown key 'rollout.sampels'; did you mean 'samples'?"),
        ("steps", "the command line: 'steps' is not of the form key=value"),
        ("steps=zero", "the command line: 'steps'"),
    ]:
        with pytest.raises(UserError) as caught:
            load_job(path, [override])
        assert sentence in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    write(tmp_path, "quick.yaml", RL)
    with pytest.raises(UserError, match="no config file .*quik.yaml; did you mean 'quick.yaml'"):
        load_job(tmp_path / "quik.yaml")
    with pytest.raises(UserError, match="bad.yaml, line 2: not valid YAML"):
        load_job(write(tmp_path, "bad.yaml", "a: 1\n b: 2\n"))
    with pytest.raises(UserError, match="a config is a mapping"):
        load_job(write(tmp_path, "list.yaml", "- 1\n"))
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    with pytest.raises(UserError, match="leads back to itself"):
        load_job(write(tmp_path, "b.yaml", "extends: a.yaml\n"))


def test_jobs_of_a_pipeline_inherit_and_refer_to_earlier_ones():
    job = load_job("configs/quickstart.yaml", ["seed=5", "runs=elsewhere", "jobs.rl.seed=6"])
    assert isinstance(job, PipelineJob)
    assert [type(j) for j in job.jobs.values()] == [SftJob, RlJob, EvaluateJob]
    assert [j.seed for j in job.jobs.values()] == [5, 6, 5]
    assert {j.runs for j in job.jobs.values()} == {"elsewhere"}
    assert job.jobs["rl"].name == "quickstart/rl"
    with pytest.raises(UserError, match="'@stf', which is not an earlier job; did you mean 'sft'"):
        load_job("configs/quickstart.yaml", ["jobs.rl.model.path=@stf"])


def test_every_field_of_every_job_is_described():
    undocumented = [
        f"{name}.{field}"
        for name, model in job_schema()["$defs"].items()
        for field, schema in model.get("properties", {}).items()
        if field not in ("kind", "type", "name") and "description" not in schema
    ]
    assert not undocumented
