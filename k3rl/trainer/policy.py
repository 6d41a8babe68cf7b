"""The trained model together with its head, as one module: what FSDP wraps and what a step calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3rl.models import LanguageModel
from k3rl.trainer.logprobs import linear_logprobs
from k3rl.trainer.lora import merged_weights


class Policy(nn.Module):
    """Packed token ids in, log-probs of the wanted tokens out; logits of a whole batch never exist.

    Suffixes: T packed tokens, N sequences, P tokens with loss, L expert layers, K experts a token.
    """

    def __init__(self, model: LanguageModel, temperature: float = 1.0, chunk_bytes: int = 0) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.chunk_bytes = temperature, chunk_bytes

    def forward(
        self,
        ids_T: Tensor,
        cu_N1: Tensor,
        predict_P: Tensor,
        targets_P: Tensor,
        entropy_gradient: bool = False,
        temperature: float | None = None,
        routing_TLK: Tensor | None = None,
        requested_PK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(log-probs [P], entropy [P], log-probs of ``requested_PK``) in float32, of the distribution at the policy's
        temperature.

        ``routing_TLK`` replays an engine's expert choices; the experts' weights still come from the live
        router.
        """
        replay = self.model.replay_routing(routing_TLK) if routing_TLK is not None else nullcontext()
        with replay:
            hidden_TD = self.model(ids_T, cu_N1)
        out = linear_logprobs(
            hidden_TD.index_select(0, predict_P),
            self.model.head_weight(),
            targets_P,
            temperature=self.temperature if temperature is None else temperature,
            entropy=True,
            entropy_gradient=entropy_gradient,
            requested_TK=requested_PK,
            chunk_bytes=self.chunk_bytes,
        )
        assert out.entropy_T is not None
        return out.logprobs_T, out.entropy_T, out.requested_TK


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that train, by name; tied ones once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def whole_weights(
    policy: nn.Module, model: LanguageModel, dtypes: dict[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """What `LanguageModel.named_weights` gives, from a model whose parameters may be sharded or of a wider
    type.

    Sharded tensors are gathered one at a time, so all ranks must iterate together. Names, order and dtypes
    are those the model was loaded with; `ValueError` where a weight isn't one of them.
    """
    if any("lora_" in n for n, _ in policy.named_parameters()):
        source: Iterator[tuple[str, Tensor]] = merged_weights(model)
    elif not any(isinstance(p, DTensor) for p in policy.parameters()):
        source = model.named_weights()
    else:
        source = _gathered(model)
    for name, tensor in source:
        if name not in dtypes:
            raise ValueError(f"weight '{name}' isn't one of those the model was loaded with")
        yield name, tensor.to(dtypes[name])


def _gathered(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue  # tied
        seen.add(id(tensor))
        whole = tensor.detach()
        yield from model.unfuse(name, whole.full_tensor() if isinstance(whole, DTensor) else whole)


def device_of(name: str) -> torch.device:
    """``auto`` is the current CUDA device where there is one."""
    if name != "auto":
        return torch.device(name)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
