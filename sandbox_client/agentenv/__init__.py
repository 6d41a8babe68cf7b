"""Sandboxes of an AgentENV server, over HTTP."""

from sandbox_client.agentenv.backend import AgentEnvBackend
from sandbox_client.agentenv.config import AgentEnvConfig

__all__ = ["AgentEnvBackend", "AgentEnvConfig"]
