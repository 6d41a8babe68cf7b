"""Runs on disk: config, metrics, rollouts, checkpoints, ledger. Readable at any moment, whatever dies."""

from k3rl.store.rows import ROLLOUT_SCHEMA, rollout_row
from k3rl.store.run import RunStore

__all__ = ["ROLLOUT_SCHEMA", "RunStore", "rollout_row"]
