"""Sandboxes for untrusted code: one protocol, a local isolating backend, and AgentENV over HTTP."""

from sandbox_client.errors import SandboxError
from sandbox_client.fleet import Fleet, FleetConfig, Lease
from sandbox_client.local import LocalBackend
from sandbox_client.sync import SyncBackend, SyncSandbox
from sandbox_client.types import (
    Backend,
    Capabilities,
    Chunk,
    ExecResult,
    FileInfo,
    Limits,
    Process,
    Sandbox,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    State,
)

__all__ = [
    "Backend",
    "Capabilities",
    "Chunk",
    "ExecResult",
    "FileInfo",
    "Fleet",
    "FleetConfig",
    "Lease",
    "Limits",
    "LocalBackend",
    "Process",
    "Sandbox",
    "SandboxError",
    "SandboxInfo",
    "SandboxSpec",
    "SnapshotInfo",
    "State",
    "SyncBackend",
    "SyncSandbox",
]
