"""Both backends behind one fixture, and an AgentENV server of the test's own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox_client import LocalBackend
from sandbox_client.agentenv import AgentEnvBackend
from sandbox_client.errors import IsolationUnavailable
from sandbox_client.local import bwrap

sys.path.insert(0, str(Path(__file__).parent))

from agentenv_client import client_config
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
