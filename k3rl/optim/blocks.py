"""Which parameters Muon takes, and into which matrices each is cut: one per head, one per expert, or itself.

Everything else is AdamW's: embeddings, the head, norms, biases, depthwise convolutions, and single rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from k3rl.models.base import LanguageModel


@dataclass(frozen=True)
class Block:
    """How a parameter is a set of matrices.

    ``rows``: [n * size, C] is n matrices [size, C]. ``columns``: [R, n * size] is n matrices [R, size]. ``stack``:
    [n, R, C] is n matrices. ``whole``: one matrix. ``size`` is meant for the first two.
    """

    kind: Literal["rows", "columns", "stack", "whole"] = "whole"
    size: int = 0

    def cut(self, tensor: Tensor) -> Tensor:
        """The matrices, [n, R, C]; `join` is the reverse."""
        if self.kind == "rows":
            return tensor.unflatten(0, (-1, self.size))
        if self.kind == "columns":
            return tensor.unflatten(1, (-1, self.size)).movedim(1, 0)
        return tensor if self.kind == "stack" else tensor[None]

    def join(self, matrices_NRC: Tensor) -> Tensor:
        if self.kind == "rows":
            return matrices_NRC.flatten(0, 1)
        if self.kind == "columns":
            return matrices_NRC.movedim(0, 1).flatten(1)
        return matrices_NRC if self.kind == "stack" else matrices_NRC[0]


WHOLE = Block()


def plan_blocks(module: nn.Module, per_head: bool = True) -> dict[str, Block]:
    """Name of every parameter that Muon takes, as in ``module.named_parameters()``, and how it is cut."""
    others = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    others |= {id(m.head_weight()) for m in module.modules() if isinstance(m, LanguageModel)}
    heads = _head_blocks(module) if per_head else {}
    plan: dict[str, Block] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) in others or parameter.ndim < 2 or min(parameter.shape[-2:]) < 2:
            continue
        if parameter.ndim == 2:
            plan[name] = heads.get(name, WHOLE)
        elif parameter.ndim == 3:
            plan[name] = Block("stack")
    return plan


_ROWS, _COLUMNS = ("q_proj", "k_proj", "v_proj"), ("o_proj",)


def _head_blocks(module: nn.Module) -> dict[str, Block]:
    """K3's attentions say themselves how their heads lie; transformers' have a `head_dim` and the usual names."""
    found: dict[str, Block] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if callable(getattr(part, "head_blocks", None)):
            for name, (axis, size) in part.head_blocks().items():
                found[prefix + name] = Block("rows" if axis == 0 else "columns", size)
        elif isinstance(size := getattr(part, "head_dim", None), int):
            for names, kind in ((_ROWS, "rows"), (_COLUMNS, "columns")):
                for name in names:
                    weight = getattr(getattr(part, name, None), "weight", None)
                    axis = 0 if kind == "rows" else 1
                    if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[axis] % size == 0:
                        found[f"{prefix}{name}.weight"] = Block(kind, size)  # type: ignore[arg-type]
    return found
