"""AgentENV's records: what is sent at creation, and what comes back, made ours (spec/07 §3)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sandbox_client.agentenv.config import AgentEnvConfig
from sandbox_client.errors import SandboxNotFound, ServerFault
from sandbox_client.types import MIB, SandboxInfo, SandboxSpec, SnapshotInfo, State

CREATE_KEY = "k3rl-create"
"""Metadata key whose value marks one create call: how a sandbox is found again whose answer never came."""
IMAGE = "image:"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def checked(*parts: str) -> str:
    """Ids become parts of an address, so nothing that could change the address may be in them."""
    for part in parts:
        if not _ID.fullmatch(part):
            raise SandboxNotFound(f"malformed id '{part[:80]}'", code=404)
    return "/".join(parts)


def whole_seconds(seconds: float) -> int:
    return max(1, math.ceil(seconds))


def create_request(spec: SandboxSpec, config: AgentEnvConfig) -> tuple[str, dict[str, Any], float]:
    """-> (path, body, time limit). The two creates spell internet access differently (spec/07 §3)."""
    body: dict[str, Any] = {
        "timeout": whole_seconds(spec.ttl_s),  # always sent: the default is 15 s
        "autoPause": spec.auto_pause,
        "autoResume": {"enabled": spec.auto_resume},
        "secure": True,
        "metadata": dict(spec.metadata),
        "envVars": dict(spec.env),
    }
    if not spec.template.startswith(IMAGE):
        body |= {"templateID": spec.template, "allow_internet_access": spec.network}
        return "/sandboxes", body, config.request_s
    limits = spec.limits
    body |= {
        "image": spec.template.removeprefix(IMAGE),
        "allowInternetAccess": spec.network,
        "cpuCount": max(1, math.ceil(limits.cpus)),
        "memoryMB": max(128, math.ceil(limits.memory_bytes / MIB)),
        "diskSizeMB": 1024 * max(1, math.ceil(limits.disk_bytes / (1024 * MIB))),
    }
    return "/sandboxes-cold", body, config.cold_create_s


def _time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def sandbox_info(said: Mapping[str, Any]) -> SandboxInfo:
    try:
        return SandboxInfo(
            id=str(said["sandboxID"]),
            template=str(said["templateID"]),
            state=State(said["state"]),
            started_at=_time(said["startedAt"]),
            ends_at=_time(said["endAt"]),
            metadata=dict(said.get("metadata") or {}),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ServerFault(f"a sandbox record that cannot be read: {error!r}") from error


def snapshot_info(said: Mapping[str, Any]) -> SnapshotInfo:
    try:
        return SnapshotInfo(str(said["snapshotID"]), tuple(said.get("names") or ()), _time(said["createdAt"]))
    except (KeyError, ValueError, TypeError) as error:
        raise ServerFault(f"a snapshot record that cannot be read: {error!r}") from error
