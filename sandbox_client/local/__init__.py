"""Sandboxes on this machine: bubblewrap, control groups, seccomp."""

from sandbox_client.local.backend import LocalBackend

__all__ = ["LocalBackend"]
