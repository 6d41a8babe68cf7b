"""Where a model's tensors are: on its device, on the host (sleep level 1), or nowhere (level 2)."""

from __future__ import annotations

import torch

from k3rl.models.base import LanguageModel


class ModelMemory:
    """Moves a model's tensors out of and back into device memory without touching its structure.

    ``has_weights`` is false from a level-2 sleep until weights were loaded again: whoever generates in
    between gets an error, never tokens from empty tensors (spec/09 trap 9).
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.device = next(model.parameters()).device
        self.level = 0
        self.has_weights = True
        self._shapes: dict[int, torch.Size] = {}

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    def sleep(self, level: int) -> None:
        """Level 1: to the host. Level 2: weights that `load_named_weights` brings back are dropped, the
        rest goes to the host."""
        published = set()
        if level == 2:
            published = {t.untyped_storage().data_ptr() for _, t in self._model.named_weights()}
            self.has_weights = False
        for tensor in self._tensors():
            if tensor.untyped_storage().data_ptr() in published and tensor.numel():
                self._shapes[id(tensor)] = tensor.shape
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            else:
                tensor.data = tensor.data.to("cpu")
        self.level = level
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Back to the device. Dropped weights come back as NaN, so that a use of them can't pass unseen (bytes as 255,
        which is the scale of NaNs)."""
        for tensor in self._tensors():
            shape = self._shapes.get(id(tensor))
            if shape is None:
                tensor.data = tensor.data.to(self.device)
            else:
                fill = torch.nan if tensor.is_floating_point() else 255 if tensor.dtype is torch.uint8 else 0
                tensor.data = torch.full(shape, fill, dtype=tensor.dtype, device=self.device)
        self._shapes.clear()
        self.level = 0
