"""A real local backend for the tests of this folder, on an event loop that lives as long as they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from played import Played

from k3rl.config.rollout import SandboxConfig
from k3rl.types import Problem
from rollout.environments.sandboxes import Sandboxes
from sandbox_client import LocalBackend


@pytest.fixture(scope="session")
def do() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine to its end on a loop in a thread of its own, as a rollout worker does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda call: asyncio.run_coroutine_threadsafe(call, loop).result(120)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def backend(tmp_path_factory, do) -> Iterator[LocalBackend]:
    backend = LocalBackend(tmp_path_factory.mktemp("sandboxes"))
    assert backend.capabilities.isolated, backend.capabilities.notes
    yield backend
    do(backend.close())


@pytest.fixture(scope="session")
def sandboxes(tmp_path_factory, do) -> Iterator[Sandboxes]:
    sandboxes = Sandboxes(
        SandboxConfig(), folder=tmp_path_factory.mktemp("fleet"), owner="w0", tool_timeout_s=20.0
    )
    yield sandboxes
    do(sandboxes.close())


@pytest.fixture
def play(do, sandboxes) -> Iterator[Callable[[Problem], Played]]:
    played: list[Played] = []

    def start(problem: Problem, own: Sandboxes | None = None) -> Played:
        played.append(Played(do, own or sandboxes, problem))
        return played[-1]

    yield start
    for one in played:
        do(one.environment.close())
