"""The contract of every language model here: packed forward, slot cache, named weights.

Legend: T tokens packed, N sequences, D hidden width, V vocabulary, S slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.models.cache import Cache
from k3rl.models.packing import Layout


class LanguageModel(nn.Module, ABC):
    """A causal language model over packed token ids. Implementations: `K3Model`, `HFModel`."""

    vocab_size: int
    hidden_size: int
    max_context: int
    activation_checkpointing: bool = False

    def forward(
        self,
        input_ids_T: Tensor,
        cu_seqlens: Tensor,
        cache: Cache | None = None,
        slots_N: Tensor | None = None,
    ) -> Tensor:
        """Final-normed hidden states [T, D] of sequences packed back to back.

        ``cu_seqlens`` is integer [N+1], rising from 0 to T. With a cache, sequence i continues from slot
        ``slots_N[i]`` (slot i where None) and writes its new state there; slots must differ. One token for every
        sequence is a decode step; anything else is (chunked) prefill, which may mix both.
        Raises ValueError for a malformed batch or where a sequence outgrows its slot.
        """
        layout = Layout(input_ids_T.shape[0], cu_seqlens, input_ids_T.device, cache, slots_N)
        hidden_TD = self._forward(input_ids_T, layout)
        if cache is not None:
            grown = layout.past_N + (1 if layout.decode else layout.lengths_N)
            if layout.all_slots:
                cache.lengths.copy_(grown)
            else:
                cache.lengths[layout.slots_N] = grown
        return hidden_TD

    @abstractmethod
    def _forward(self, input_ids_T: Tensor, layout: Layout) -> Tensor: ...

    @abstractmethod
    def head_weight(self) -> Tensor:
        """The language-model head [V, D], tied to the embedding or not."""

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Float32 logits [T, V]. Take few rows at a time where V is large."""
        return F.linear(hidden_TD, self.head_weight()).float()

    @abstractmethod
    def make_cache(self, num_slots: int, max_tokens: int, device: torch.device | str | None = None) -> Cache:
        """An empty cache for so many sequences of at most so many tokens."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name and live tensor of every weight, tied tensors once, in a fixed order.

        The unit of publication: some are views into larger parameters, so writing to them changes the model.
        """

    @torch.no_grad()
    def load_named_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights: each name exactly once, dtype and shape as here, everything or nothing.

        Raises ValueError naming the first tensor that does not fit; the model then keeps what it had.
        """
        own = dict(self.named_weights())
        incoming: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name not in own:
                raise ValueError(f"weight '{name}' is not one of this model's {len(own)}")
            if name in incoming:
                raise ValueError(f"weight '{name}' came twice")
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"weight '{name}' has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
                )
            if tensor.dtype != own[name].dtype:
                raise ValueError(f"weight '{name}' is {tensor.dtype}, expected {own[name].dtype}")
            incoming[name] = tensor
        missing = own.keys() - incoming.keys()
        if missing:
            raise ValueError(f"{len(missing)} weights did not come, among them '{min(missing)}'")
        for name, tensor in incoming.items():
            own[name].copy_(tensor)
        for (
            module
        ) in self.modules():  # values that are kept beside the weights, and that CUDA graphs may read
            if hasattr(module, "weights_changed"):
                module.weights_changed()

    def config_dict(self) -> dict[str, object]:
        """Content of the checkpoint's `config.json`."""
        raise TypeError(f"{type(self).__name__} writes its own config")
