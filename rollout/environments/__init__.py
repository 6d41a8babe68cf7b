"""Environments that use sandboxes. Importing this registers them by name."""

from rollout.environments.code_repair import CodeRepair
from rollout.environments.data_question import DataQuestion
from rollout.environments.shell_lookup import ShellLookup
from rollout.environments.workspace import Workspace

__all__ = ["CodeRepair", "DataQuestion", "ShellLookup", "Workspace"]
