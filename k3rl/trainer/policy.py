"""The trained model together with its head, as one module: what FSDP wraps and what a step calls."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from k3rl.models import LanguageModel
from k3rl.trainer.logprobs import linear_logprobs


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
    ) -> tuple[Tensor, Tensor]:
        """(log-probs [P], entropy [P]) in float32, of the distribution at the policy's temperature.

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
            chunk_bytes=self.chunk_bytes,
        )
        assert out.entropy_T is not None
        return out.logprobs_T, out.entropy_T


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that train, by name; tied ones once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def device_of(name: str) -> torch.device:
    """``auto`` is the current CUDA device where there is one."""
    if name != "auto":
        return torch.device(name)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
