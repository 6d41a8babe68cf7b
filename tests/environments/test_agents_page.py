"""docs/agents.md says what there is, and its Python runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from k3rl.config.load import validate
from k3rl.config.rollout import AgentConfig
from k3rl.data import load_problems
from k3rl.data.config import JsonlData
from k3rl.data.shell_lookup import shell_lookup
from k3rl.errors import UserError
from k3rl.recipes.run import check_job
from rollout.environment import environment_factory, make_environment
from rollout.environments.tools import TOOLS, declaration

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """The table below a heading, by its first cell."""
    table = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [
        [c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_tables_name_every_environment_and_tool():
    for name, (_, _, tools) in rows("Environments").items():
        default = environment_factory(name).default_tools
        assert tools == "all" or tuple(re.findall(r"`(\w+)`", tools)) == default
    listed = rows("Tools")
    assert set(listed) == {*TOOLS, "submit"}
    for name, (arguments, _) in listed.items():
        properties = declaration(name)["function"]["parameters"]["properties"]
        assert re.findall(r"`(\w+)`", arguments) == list(properties)


def test_the_pages_environment_runs(play):
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    exec(compile(block, "docs/agents.md", "exec"), {"__name__": "page"})
    game = play(replace(shell_lookup(size=1)[0], metadata={"environment": "count_lines"}))
    assert game.call("bash", command="wc -l < poem.txt") == "3"
    assert game.answer("3") == 1.0


def test_a_data_source_names_the_environment_of_its_problems(tmp_path, sandboxes):
    (shown,) = re.findall(r"^data: (\{type: jsonl.*\})$", PAGE, re.M)
    file = tmp_path / "problems.jsonl"
    task = {"files": {"notes.txt": "7"}, "answer": "7"}
    file.write_text(json.dumps({"prompt": "What is in notes.txt?", "reward": "environment", "task": task}))
    config = JsonlData.model_validate(yaml.safe_load(shown) | {"path": str(file)})
    problem = load_problems(config)[0]
    assert problem.metadata["environment"] == "shell_lookup"
    job = AgentConfig(environment="data_question")
    assert type(make_environment(problem, job, sandboxes)).__name__ == "ShellLookup"
    with pytest.raises(ValueError, match="registered name"):
        JsonlData.model_validate({"path": str(file), "environment": "package.module:anything"})


def test_without_sandboxes_an_environment_that_needs_them_says_so():
    with pytest.raises(UserError, match="needs sandboxes"):
        make_environment(shell_lookup(size=1)[0], AgentConfig())


RL = {
    "kind": "rl",
    "name": "agent",
    "data": {
        "type": "callable",
        "function": "k3rl.data.shell_lookup:shell_lookup",
        "arguments": {"size": 4, "terse": True},
    },
    "steps": 1,
    "rollout": {"groups": 1, "samples": 2, "max_context": 256},
}


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"environment": "shell_lokup"}, "did you mean 'shell_lookup'"),
        ({"environment": "data_question", "arguments": {"bash_sec": 3}}, "did you mean 'bash_s'"),
        ({"sandbox": {"backend": "agentenv"}}, "agent.sandbox: there are no sandboxes here"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_before_anything_starts(agent, said, monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTENV_URL", "http://127.0.0.1:9")
    data = RL["data"]
    if "environment" in agent:  # of problems that name none
        rows = [{"prompt": "x", "reward": "environment", "task": {"files": {}, "answer": "7"}}]
        file = tmp_path / "problems.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        data = {"type": "jsonl", "path": str(file), "columns": {"metadata": ["task"]}}
    job = RL | {"data": data, "rollout": RL["rollout"] | {"agent": agent}}
    with pytest.raises(UserError, match=said):
        check_job(validate(job, {}, "test"))


def test_a_job_with_sandboxes_passes_the_check():
    check_job(validate(RL, {}, "test"))
