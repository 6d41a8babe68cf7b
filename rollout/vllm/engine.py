"""`VLLMEngine`: vLLM behind the engine contract, driven step by step in the caller's thread.

Token ids go in and come out; vLLM's tokenizer is never loaded. Log-probs are the processed distribution's.
A pause aborts and a resumption recomputes, from tokens that the records already hold. Stop rules are this
project's own. Each piece of a response is seeded from its trajectory's key and position, so pieces are
reproducible, but unlike the native engine's stream, a response cut elsewhere draws other noise.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3rl.quant.config import QatConfig
from k3rl.types import StopReason
from rollout.engine import EngineStats, Generation
from rollout.native.stops import Decode, StopRules, check_request
from rollout.sampling import stream_bits
from rollout.vllm.expected import collect, expected_weights
from rollout.vllm.probe import probe
from rollout.vllm.quantised import check_scheme, read_folder, served


@dataclass(slots=True)
class _Request:
    generation: Generation
    stop: StopRules
    order: int


def _model_length(folder: Path, max_context: int | None) -> int | None:
    """vLLM's max_model_len: one more than is used, since scoring makes vLLM generate a token after the
    sequence."""
    config = json.loads((folder / "config.json").read_text())
    longest = config.get("text_config", config).get("max_position_embeddings")
    if max_context is None:
        return longest
    return max_context + 1 if longest is None else min(max_context + 1, longest)


class VLLMEngine:
    """Implements `rollout.engine.Engine`.

    model_path            folder with config.json and safetensors.
    max_slots             most sequences at once (vLLM's max_num_seqs).
    max_context           most tokens of context and response together.
    eos_token_ids         end a response, unless a request ignores them.
    decode                token ids to text; needed for stop strings only.
    tensor_parallel_size  GPUs of this engine.
    prefix_caching        vLLM's own; reset with every weight update.
    reuse_stale           running sequences keep their caches across a weight update (else recomputed).
    qat                   the trainer's scheme: what it fake-quantises is served rounded by the same function.
    engine_args           further `vllm.EngineArgs`, for what is not named here.
    """

    def __init__(
        self,
        model_path: str | Path,
        max_slots: int = 64,
        max_context: int | None = None,
        eos_token_ids: Iterable[int] = (),
        *,
        decode: Decode | None = None,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        prefix_caching: bool = True,
        reuse_stale: bool = False,
        qat: QatConfig | None = None,
        engine_args: dict[str, Any] | None = None,
        version: int = 0,
    ) -> None:
        probe()
        check_scheme(Path(model_path), qat)
        from vllm import EngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.llm_engine import LLMEngine

        self._sleep_mode = torch.cuda.is_available()  # vLLM frees nothing on other devices
        args = {
            "model": str(model_path),
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "max_num_seqs": max_slots,
            "max_model_len": _model_length(Path(model_path), max_context),
            "tensor_parallel_size": tensor_parallel_size,
            "enable_prefix_caching": prefix_caching,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self._sleep_mode,
            "worker_extension_cls": "rollout.vllm.transfer.WorkerExtension",
            "weight_transfer_config": WeightTransferConfig(backend="k3rl"),
            "async_scheduling": False,  # a step returns the tokens it made: none is under way between steps
            "generation_config": "vllm",
            "disable_log_stats": True,
        } | (engine_args or {})
        self._llm = LLMEngine.from_engine_args(EngineArgs(**args))
        config = self._llm.vllm_config.model_config
        if config.logprobs_mode != "processed_logprobs":
            raise RuntimeError(
                f"vLLM reports log-probs of mode '{config.logprobs_mode}', not of what it samples from"
            )
        self.max_context = config.max_model_len - 1
        self.vocab_size = config.get_vocab_size()
        self.max_slots = max_slots
        self.eos_token_ids = frozenset(eos_token_ids)
        self.version = version
        self._decode = decode
        self._reuse_stale = reuse_stale
        self._expected = expected_weights(Path(model_path), config.dtype)
        self._requests: dict[str, _Request] = {}
        self._finished: list[Generation] = []
        self._scores: dict[str, Any] = {}
        self._order = self._generated = self._prefilled = 0
        self._level = 0
        self._has_weights = True
        self._dtype, self._qat = config.dtype, qat
        if qat is not None:  # vLLM has read the folder's master weights
            dtypes = {name: kind for name, (_, kind) in self._expected.items()}
            self.load_weights(read_folder(Path(model_path), dtypes), version)

    # -- requests
    # ----------------------------------------------------------------------------------------------

    def submit(self, generations: Iterable[Generation]) -> None:
        """Queue them, in order. All are checked before any is queued (`ValueError`)."""
        self._require_weights()
        generations = list(generations)
        seen = set(self._requests)
        for generation in generations:
            check_request(generation, seen, self.vocab_size, self.max_context, self._decode)
            seen.add(generation.id)
        for generation in generations:
            stop = StopRules(generation, self.eos_token_ids, self.max_context, self._decode)
            generation.stop_reason = stop.reason(generation)
            if generation.done:
                self._finished.append(generation)
                continue
            self._order += 1
            self._requests[generation.id] = _Request(generation, stop, self._order)
            self._add(generation, stop)

    def _add(self, generation: Generation, stop: StopRules) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params, done = generation.sampling, len(generation.token_ids)
        greedy = params.temperature == 0
        self._llm.add_request(
            generation.id,
            {"prompt_token_ids": generation.context_ids + generation.token_ids},
            SamplingParams(
                temperature=params.temperature,
                top_p=1.0 if greedy else params.top_p,
                top_k=0 if greedy else params.top_k,
                min_p=0.0 if greedy else params.min_p,
                seed=stream_bits(generation.key, generation.offset + done) >> 1,
                max_tokens=stop.limit - done,
                stop_token_ids=sorted(stop.ids),
                ignore_eos=True,  # the ids that end a turn are all in stop_token_ids
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        self._prefilled += len(generation.context_ids) + done

    def pending(self) -> int:
        return len(self._requests) + len(self._finished)

    def abort(self, ids: Iterable[str]) -> list[Generation]:
        """Take these out, with stop reason `ABORTED`; ids that are not here are ignored."""
        known = [id_ for id_ in ids if id_ in self._requests]
        self._llm.abort_request(known)
        out = [self._requests.pop(id_).generation for id_ in known]
        for generation in out:
            generation.stop_reason = StopReason.ABORTED
        return out

    def pause(self) -> list[Generation]:
        """Take everything out, oldest first; a resumption recomputes (from vLLM's prefix cache, if
        unchanged)."""
        out = sorted(self._requests.values(), key=lambda r: r.order)
        self._llm.abort_request(list(self._requests))
        self._requests.clear()
        return [r.generation for r in out]

    # -- one step
    # ------------------------------------------------------------------------------------------------

    def step(self) -> list[Generation]:
        """One step of vLLM's scheduler; return what finished."""
        self._require_weights()
        if self._requests:
            self._pump()
        done, self._finished = self._finished, []
        return done

    def _pump(self) -> None:
        for output in self._llm.step():
            if output.request_id in self._scores:
                self._scores[output.request_id] = output
                continue
            request = self._requests.get(output.request_id)
            if request is not None:
                self._take(request, output.outputs[0])

    def _take(self, request: _Request, output: Any) -> None:
        """Append what a step brought. What follows a stop string is not part of the response."""
        generation = request.generation
        entries = output.logprobs or []
        if len(entries) != len(output.token_ids):
            raise RuntimeError(f"vLLM returned {len(output.token_ids)} tokens with {len(entries)} log-probs")
        for token, entry in zip(output.token_ids, entries, strict=True):
            generation.token_ids.append(token)
            generation.logprobs.append(entry[token].logprob)  # by id: further entries may be other tokens
            generation.versions.append(self.version)
            self._generated += 1
            generation.stop_reason = request.stop.reason(generation)
            if generation.done:
                break
        if output.finish_reason is not None and not generation.done:
            generation.stop_reason = StopReason.ERROR
            generation.error = f"vLLM ended the request with '{output.finish_reason}'"
        if generation.done:
            if output.finish_reason is None:
                self._llm.abort_request([generation.id])
            del self._requests[generation.id]
            self._finished.append(generation)

    # -- scoring, weights, memory
    # ----------------------------------------------------------------------------------

    def score(self, sequences: list[list[int]], starts: list[int]) -> list[list[float]]:
        """See the protocol. A start of 0 has nothing before it and is refused (`ValueError`)."""
        from vllm import SamplingParams

        self._require_weights()
        for ids, start in zip(sequences, starts, strict=True):
            if not 1 <= start <= len(ids):
                raise ValueError(f"a sequence of {len(ids)} tokens cannot be scored from {start}")
            if len(ids) > self.max_context:
                raise ValueError(f"a sequence of {len(ids)} tokens exceeds the context of {self.max_context}")
        names = [f"score-{uuid.uuid4().hex}" for _ in sequences]
        self._scores = dict.fromkeys(names)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        for name, ids in zip(names, sequences, strict=True):
            self._llm.add_request(name, {"prompt_token_ids": ids}, params)
        while any(output is None or not output.finished for output in self._scores.values()):
            self._pump()
        outputs, self._scores = self._scores, {}
        return [
            [outputs[name].prompt_logprobs[i][ids[i]].logprob for i in range(start, len(ids))]
            for name, ids, start in zip(names, sequences, starts, strict=True)
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See the protocol. Everything is checked before vLLM's weights are touched; should vLLM itself
        fail in between, the engine refuses to generate until a load succeeds."""
        if self._level == 1:
            raise RuntimeError("the engine sleeps: wake it before loading weights")
        tensors = collect(served(weights, self._expected, self._dtype, self._qat), self._expected)
        running = list(self._requests.values())
        if not self._reuse_stale:
            self._llm.abort_request(list(self._requests))
        self._has_weights = False
        self._llm.collective_rpc("start_weight_update")
        self._send(tensors)
        self._llm.collective_rpc("finish_weight_update")
        self._has_weights = True
        self.version = version
        if not self._reuse_stale:
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache after a weight update")
            for request in running:
                self._add(request.generation, request.stop)

    def _send(self, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        from rollout.vllm import transfer

        if hasattr(self._llm, "model_executor") and self._llm.vllm_config.parallel_config.world_size == 1:
            parcel = uuid.uuid4().hex
            transfer.PARCELS[parcel] = tensors
            try:
                self._update({"parcel": parcel})
            finally:
                del transfer.PARCELS[parcel]
            return
        shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="k3rl-weights-", dir=shared) as folder:
            path = str(Path(folder) / "update.safetensors")
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path)
            self._update({"path": path})

    def _update(self, info: dict[str, str]) -> None:
        self._llm.collective_rpc("update_weights", kwargs={"update_info": info})

    def sleep(self, level: int = 1) -> None:
        """See the protocol. Raises `RuntimeError` while anything is queued or running: pause first."""
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level}")
        if self._requests:
            raise RuntimeError(
                f"{len(self._requests)} generations are queued or running: pause before sleeping"
            )
        if self._level:
            raise RuntimeError("the engine already sleeps")
        self._llm.reset_prefix_cache()
        if self._sleep_mode:
            self._llm.sleep(level)
        self._level = level
        self._has_weights = self._has_weights and level == 1

    def wake(self) -> None:
        """After level 2 the weights' memory comes back empty: load before generating."""
        if not self._level:
            raise RuntimeError("the engine is awake")
        if self._sleep_mode:
            self._llm.wake_up()
        self._level = 0

    def shutdown(self) -> None:
        """Stop vLLM's workers and free their memory. One that ran in this process leaves no process group behind."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        self._llm.engine_core.shutdown()
        destroy_model_parallel()
        destroy_distributed_environment()

    def _require_weights(self) -> None:
        if self._level:
            raise RuntimeError("the engine sleeps: wake it first")
        if not self._has_weights:
            raise RuntimeError("no weights: they were dropped by a level 2 sleep and not loaded since")

    def stats(self) -> EngineStats:
        running = min(len(self._requests), self.max_slots)
        cache = self._llm.vllm_config.cache_config
        blocks = getattr(cache, "num_gpu_blocks", None) or 1
        held = sum(
            len(r.generation.context_ids) + len(r.generation.token_ids) for r in self._requests.values()
        )
        return EngineStats(
            running=running,
            queued=len(self._requests) - running,
            kv_used_fraction=min(1.0, held / (blocks * cache.block_size)),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            version=self.version,
        )
