"""`k3rl doctor` says what the clients would use, from the same variables, and never a key."""

import pytest
from typer.testing import CliRunner

from k3rl.cli import app
from k3rl.doctor import examine, show
from sandbox_client.agentenv import AgentEnvConfig

VARIABLES = [
    f"{family}_{name}"
    for family, names in (
        ("AGENTENV", ("URL", "API_KEY", "DATA_URL", "DOMAIN")),
        ("E2B", ("API_URL", "API_KEY", "SANDBOX_URL")),
    )
    for name in names
]
KEY = "key-that-nobody-may-read"


def agentenv(monkeypatch, **environment: str):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (check,) = [c for c in examine() if c.name == "sandbox: AgentENV"]
    return check


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"AGENTENV_URL": "http://box:8000"}, "http://box:8000 (AGENTENV_URL), no key"),
        ({"E2B_API_URL": "http://box:8000"}, "http://box:8000 (E2B_API_URL), no key"),
        (
            {"AGENTENV_URL": "http://a:1", "E2B_API_URL": "http://b:2", "E2B_API_KEY": KEY},
            "http://a:1 (AGENTENV_URL), key from E2B_API_KEY",
        ),
        (
            {"AGENTENV_URL": "", "E2B_API_URL": "http://b:2", "E2B_API_KEY": KEY, "AGENTENV_API_KEY": KEY},
            "http://b:2 (E2B_API_URL), key from AGENTENV_API_KEY",
        ),
        (
            {"AGENTENV_URL": "https://a", "E2B_SANDBOX_URL": "https://data", "AGENTENV_DOMAIN": "boxes.a"},
            "https://a (AGENTENV_URL), sandboxes at https://data (E2B_SANDBOX_URL), "
            "ports under boxes.a (AGENTENV_DOMAIN), no key",
        ),
    ],
)
def test_the_server_is_the_one_that_the_client_would_use(monkeypatch, environment, found):
    check = agentenv(monkeypatch, **environment)
    assert check.ok
    assert check.found == found
    assert check.found.startswith(AgentEnvConfig.from_environment().api_url)


def test_no_server_and_no_address_are_said_with_what_to_do(monkeypatch):
    check = agentenv(monkeypatch, AGENTENV_API_KEY=KEY)
    assert (check.ok, check.found) == (False, "no server named")
    assert check.fix == "export AGENTENV_URL and AGENTENV_API_KEY"
    check = agentenv(monkeypatch, E2B_API_URL="box:8000")
    assert (check.ok, check.found) == (False, "not an http address: 'box:8000'")
    assert check.fix == "mend E2B_API_URL"


def test_the_report_holds_no_key(monkeypatch, capsys):
    agentenv(monkeypatch, AGENTENV_URL="http://box:8000", AGENTENV_API_KEY=KEY)
    show(examine())
    said = capsys.readouterr().out
    assert "http://box:8000" in said
    assert KEY not in said


def test_the_command_runs(monkeypatch):
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "sandbox: AgentENV" in done.output
