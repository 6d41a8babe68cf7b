"""Both backends behind one fixture, and an AgentENV server of the test's own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox_client import LocalBackend
from sandbox_client.agentenv import AgentEnvBackend, AgentEnvConfig
from sandbox_client.errors import IsolationUnavailable
from sandbox_client.local import bwrap

sys.path.insert(0, str(Path(__file__).parent))

from agentenv_server import AgentEnvServer


@pytest.fixture
def needs_isolation() -> None:
    try:
        bwrap.probe()
    except IsolationUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def server(tmp_path: Path, needs_isolation: None) -> Iterator[AgentEnvServer]:
    with AgentEnvServer(tmp_path / "server") as found:
        yield found
        assert found.mistakes == []


def client_config(server: AgentEnvServer, **changes) -> AgentEnvConfig:
    """Short patience, so that faults are tested in seconds."""
    quick = {"patience_s": 5.0, "lookup_s": 1.0, "first_call_pause_s": 0.05, "request_s": 30.0}
    return AgentEnvConfig(api_url=server.url, api_key=server.api_key, **{**quick, **changes})


@pytest.fixture
async def agentenv(server: AgentEnvServer) -> AsyncIterator[AgentEnvBackend]:
    async with AgentEnvBackend(client_config(server)) as found:
        yield found


@pytest.fixture(params=["local", "agentenv"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path, needs_isolation: None):
    """Each backend in turn."""
    if request.param == "local":
        async with LocalBackend(tmp_path / "local") as found:
            yield found
    else:
        server = request.getfixturevalue("server")
        async with AgentEnvBackend(client_config(server)) as found:
            yield found
