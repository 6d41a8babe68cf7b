"""Environments that use sandboxes. Importing this registers them by name."""

from rollout.environments.code_repair import CodeRepair
from rollout.environments.data_question import DataQuestion
from rollout.environments.shell_lookup import ShellLookup

__all__ = ["CodeRepair", "DataQuestion", "ShellLookup"]
