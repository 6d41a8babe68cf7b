"""The slot cache: whatever a model keeps per sequence between two forwards.

Owner: the engine. It decides which slot a sequence lives in, resets a slot before a new sequence, and calls a
model's forward, which alone writes to it. Legend: S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Cache:
    """Named tensors with one row per slot.

    ``tokens`` hold one entry per token ([S, max_tokens, ...], such as K/V or latents); ``states`` hold a running
    summary ([S, ...], such as KDA's matrix and the convolution's last inputs). ``lengths`` is int64 [S].
    """

    def __init__(
        self, num_slots: int, max_tokens: int, tokens: dict[str, Tensor], states: dict[str, Tensor]
    ) -> None:
        any_tensor = next(iter((tokens | states).values()))
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.tokens = tokens
        self.states = states
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=any_tensor.device)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.tokens.values(), *self.states.values()))

    def _index(self, slots: int | Sequence[int] | Tensor) -> Tensor:
        return torch.atleast_1d(torch.as_tensor(slots, dtype=torch.int64, device=self.lengths.device))

    @torch.no_grad()
    def reset(self, slots: int | Sequence[int] | Tensor | None = None) -> None:
        """Forget these slots (all by default). Contents are zeroed, so nothing of an old sequence, not even a NaN
        behind a mask, can reach a new one."""
        index = (
            torch.arange(self.num_slots, device=self.lengths.device) if slots is None else self._index(slots)
        )
        self.lengths[index] = 0
        for tensor in (*self.tokens.values(), *self.states.values()):
            tensor[index] = 0

    @torch.no_grad()
    def copy(self, src_slot: int, dst_slots: int | Sequence[int] | Tensor) -> None:
        """Make the destinations continue exactly as the source would."""
        dst = self._index(dst_slots)
        length = int(self.lengths[src_slot])
        for tensor in self.tokens.values():
            tensor[dst] = 0
            tensor[dst, :length] = tensor[src_slot, :length].clone()
        for tensor in self.states.values():
            tensor[dst] = tensor[src_slot].clone()
        self.lengths[dst] = length

    @torch.no_grad()
    def export(self, slot: int) -> dict[str, Tensor]:
        """Everything needed to continue this slot elsewhere: copies, only as long as the sequence."""
        length = int(self.lengths[slot])
        out = {name: t[slot, :length].clone() for name, t in self.tokens.items()}
        out |= {name: t[slot].clone() for name, t in self.states.items()}
        out["length"] = self.lengths[slot].clone()
        return out

    @torch.no_grad()
    def import_(self, slot: int, state: dict[str, Tensor]) -> None:
        """Continue an exported slot here. Raises ValueError where it comes from another model or is too long."""
        expected = {"length", *self.tokens, *self.states}
        if set(state) != expected:
            raise ValueError(f"cached state of another model: {sorted(set(state) ^ expected)[:4]} differ")
        length = int(state["length"])
        if length > self.max_tokens:
            raise ValueError(f"cached state of {length} tokens for a cache of {self.max_tokens}")
        for name, tensor in self.states.items():
            if state[name].shape != tensor.shape[1:]:
                raise ValueError(
                    f"cached state '{name}' is {tuple(state[name].shape)}, expected {tuple(tensor.shape[1:])}"
                )
        for name, tensor in self.tokens.items():
            if state[name].shape != (length, *tensor.shape[2:]):
                raise ValueError(f"cached state '{name}' has shape {tuple(state[name].shape)}")
        self.reset(slot)
        for name, tensor in self.tokens.items():
            tensor[slot, :length] = state[name].to(tensor)
        for name, tensor in self.states.items():
            tensor[slot] = state[name].to(tensor)
        self.lengths[slot] = length
