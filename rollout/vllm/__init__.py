"""vLLM behind this project's engine contract. Importing this package does not import vLLM; making an engine
does."""

from rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
