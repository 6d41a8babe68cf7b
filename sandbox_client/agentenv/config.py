"""Where an AgentENV server is and how patient its client is."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
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
        there, from the e2b client's ``E2B_API_URL``, ``E2B_API_KEY`` and
        ``E2B_SANDBOX_URL``."""

        def get(*names: str) -> str:
            return next((value for name in names if (value := os.environ.get(name))), "")

        return AgentEnvConfig(
            api_url=get("AGENTENV_URL", "E2B_API_URL") or "http://127.0.0.1:8000",
            api_key=get("AGENTENV_API_KEY", "E2B_API_KEY"),
            data_url=get("AGENTENV_DATA_URL", "E2B_SANDBOX_URL"),
            domain=get("AGENTENV_DOMAIN"),
        )
