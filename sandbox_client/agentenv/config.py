"""Where an AgentENV server is and how patient its client is."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class AgentEnvConfig:
    """Connection to a single node (``http://127.0.0.1:8000``) or a gateway (``:8080``); the API is the same.

    Ports inside a sandbox are reached by headers over ``data_url`` (``api_url`` where empty), or, with
    ``domain``, by the host name ``{port}-{sandbox}.{domain}``. The limits follow the server's own command
    line client (spec/07 §7).
    """

    api_url: str = "http://127.0.0.1:8000"
    api_key: str = field(default="", repr=False)
    data_url: str = ""
    domain: str = ""
    user: str = "user"
    connect_s: float = 5.0
    request_s: float = 120.0
    cold_create_s: float = 600.0
    idle_s: float = 60.0
    patience_s: float = 30.0  # how long transitions and unavailable servers are waited for
    first_call_tries: int = 10
    first_call_pause_s: float = 1.0
    lookup_s: float = 5.0  # how long a create of unknown outcome is looked for
    connections: int = 128

    def __post_init__(self) -> None:
        for url in filter(None, (self.api_url, self.data_url)):
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"not an http address: '{url}'")

    @staticmethod
    def from_environment() -> AgentEnvConfig:
        """From ``AGENTENV_URL``, ``AGENTENV_API_KEY``, ``AGENTENV_DATA_URL`` and ``AGENTENV_DOMAIN``; what is not set
        there, from the e2b client's ``E2B_API_URL``, ``E2B_API_KEY`` and ``E2B_SANDBOX_URL``. Raises `ValueError`
        where an address is none."""
        given: dict[str, Any] = {name: os.environ[v] for name, v in AgentEnvConfig.variables().items()}
        return AgentEnvConfig(**given)

    @staticmethod
    def variables() -> dict[str, str]:
        """Which environment variable `from_environment` takes a field from; fields that none names are not there."""
        chosen = {name: next(filter(os.environ.get, names), "") for name, names in _VARIABLES.items()}
        return {name: variable for name, variable in chosen.items() if variable}


_VARIABLES = {
    "api_url": ("AGENTENV_URL", "E2B_API_URL"),
    "api_key": ("AGENTENV_API_KEY", "E2B_API_KEY"),
    "data_url": ("AGENTENV_DATA_URL", "E2B_SANDBOX_URL"),
    "domain": ("AGENTENV_DOMAIN",),
}
"""The first that is set and not empty counts."""
