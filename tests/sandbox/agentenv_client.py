"""How tests reach the AgentENV server of this folder."""

from __future__ import annotations

from agentenv_server import AgentEnvServer

from sandbox_client.agentenv import AgentEnvConfig


def client_config(server: AgentEnvServer, **changes) -> AgentEnvConfig:
    """Short patience, so that faults are tested in seconds."""
    quick = {"patience_s": 5.0, "lookup_s": 1.0, "first_call_pause_s": 0.05, "request_s": 30.0}
    return AgentEnvConfig(api_url=server.url, api_key=server.api_key, **{**quick, **changes})
