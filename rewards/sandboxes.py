"""Sandboxes for rewards that ask for one: a fresh one for every call, killed after it.

One backend per process, made when first asked for. Its sandboxes end with the process, so that killing a reward's
process kills what it ran.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from k3rl.config.rewards import RewardSandbox
from sandbox_client import Backend, Limits, LocalBackend, SandboxSpec, SyncBackend, SyncSandbox

MIB = 1 << 20
_lock = threading.Lock()
_backends: dict[tuple[int, str], SyncBackend] = {}  # by process: a fork has no use for its parent's threads


def _backend(config: RewardSandbox) -> SyncBackend:
    key = (os.getpid(), config.backend)
    with _lock:
        if key not in _backends:
            _backends[key] = SyncBackend(_make(config))
        return _backends[key]


def _make(config: RewardSandbox) -> Backend:
    if config.backend == "local":
        return LocalBackend()
    from sandbox_client.agentenv import AgentEnvBackend

    return AgentEnvBackend()


@contextmanager
def fresh_sandbox(config: RewardSandbox, lifetime_s: float) -> Iterator[SyncSandbox]:
    """A sandbox without network that nothing was in before. It lives for ``lifetime_s`` at most.

    Raises `sandbox_client.SandboxError`: no sandbox is the grader's failure, never a wrong answer.
    """
    spec = SandboxSpec(
        template=config.template,
        ttl_s=lifetime_s,
        auto_pause=False,
        network=False,
        metadata={"k3rl-role": "reward"},
        limits=Limits(memory_bytes=config.memory_mb * MIB, cpus=config.cpus),
    )
    sandbox = _backend(config).create(spec)
    try:
        yield sandbox
    finally:
        sandbox.kill()


def close_backends() -> None:
    """Kill this process's sandboxes."""
    with _lock:
        mine = [key for key in _backends if key[0] == os.getpid()]
        found = [_backends.pop(key) for key in mine]
    for backend in found:
        backend.close()
