"""The native engine: this project's models, this project's batching, on CPU and GPU."""

from rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
