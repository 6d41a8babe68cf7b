"""Balances every router of a model: gathers counts while it trains, moves the biases between optimiser steps.

Owner: the trainer. It calls `reset` before a step's first pass, `step` after the weights moved. Biases never move
inside a step, so that all its micro-batches, and their recomputations, are routed alike.
Legend: T tokens, E experts, K experts a token, B bins.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3rl.models.k3.moe import Router
from k3rl.optim.config import BalancingChoice, FrozenBalancing, QuantileBalancing, SignBalancing
from k3rl.optim.quantile_balancing import Bins, exact_quantile, margins, next_bias, sign_step


class RouterBalance:
    """One router's counts since the last step, all integers but the exact form's margins."""

    def __init__(self, bias_E: Tensor, top_k: int, config: QuantileBalancing | SignBalancing) -> None:
        self.bias_E, self.top_k, self.config = bias_E, top_k, config
        self.exact = isinstance(config, QuantileBalancing) and config.bins == 0
        self.counting = True
        """Off for a pass that is no part of the batch."""
        self.reset()

    def reset(self) -> None:
        """Forget what was counted. Bins follow the bias, which is the same on all ranks."""
        self.load_E = torch.zeros(self.bias_E.shape[0], dtype=torch.int64, device=self.bias_E.device)
        self.margins: list[Tensor] = []
        self.bins: Bins | None = None
        self.counts_EB = self.load_E.new_zeros(self.bias_E.shape[0], 0)
        if isinstance(self.config, QuantileBalancing) and self.config.bins:
            self.bins = Bins.around(self.bias_E, self.config.bins)
            self.counts_EB = self.load_E.new_zeros(self.bias_E.shape[0], self.config.bins)

    @torch.no_grad()
    def observe(self, scores_TE: Tensor, ids_TK: Tensor) -> None:
        """Count one micro-batch."""
        if not self.counting:
            return
        ids = ids_TK.flatten().long()
        self.load_E.scatter_add_(0, ids, torch.ones_like(ids))
        if isinstance(self.config, SignBalancing):
            return
        margins_TE = margins(scores_TE, self.bias_E, self.top_k)
        if self.bins is None:
            self.margins.append(margins_TE)
        else:
            self.counts_EB += self.bins.count(margins_TE)

    @torch.no_grad()
    def move(self, all_margins_TE: Tensor | None) -> None:
        """Set the next step's bias from counts that all ranks have added up."""
        if int(self.load_E.sum()) == 0:
            return
        if isinstance(self.config, SignBalancing):
            new_E = sign_step(self.load_E, self.bias_E, self.config.speed)
        elif self.bins is not None:
            quantile_E = self.bins.quantile(self.counts_EB, self.top_k)
            new_E = next_bias(quantile_E, self.bias_E, self.config.ema)
        else:
            assert all_margins_TE is not None
            quantile_E = exact_quantile(all_margins_TE, self.top_k)
            new_E = next_bias(quantile_E, self.bias_E, self.config.ema)
        self.bias_E.copy_(new_E)


class RouterBalancing:
    """All routers of ``module``; nothing at all where the choice is `frozen` or there are none.

    ``group``: the ranks that share one batch; None: torch.distributed's default group where one exists.
    """

    def __init__(
        self, module: nn.Module, config: BalancingChoice, group: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.routers: dict[str, RouterBalance] = {}
        if isinstance(config, FrozenBalancing):
            return
        for name, router in module.named_modules():
            if isinstance(router, Router):
                bias_E = router.get_buffer("e_score_correction_bias")
                balance = RouterBalance(bias_E, router.top_k, config)
                router.observe = balance.observe
                self.routers[name] = balance

    def reset(self) -> None:
        """Forget what was counted, as before a step or after one that was given up."""
        for balance in self.routers.values():
            balance.reset()

    def counting(self, on: bool) -> None:
        """Whether passes from here on are counted: a rank without data of its own still has to take part in them."""
        for balance in self.routers.values():
            balance.counting = on

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Add counts over ranks with one integer all-reduce, move the biases, and count afresh.

        Returns the largest expert's load over the mean load, in the worst layer and on average over layers.
        """
        balances = list(self.routers.values())
        if not balances:
            return {}
        self._add_over_ranks(balances)
        loads_LE = torch.stack([b.load_E for b in balances]).double()
        ratios_L = loads_LE.amax(-1) / loads_LE.mean(-1).clamp_min(1e-9)
        for balance in balances:
            balance.move(self._all_margins(balance) if balance.exact else None)
        self.reset()
        return {"balance/max_load": float(ratios_L.max()), "balance/mean_max_load": float(ratios_L.mean())}

    def _ranks(self) -> int:
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    def _add_over_ranks(self, balances: list[RouterBalance]) -> None:
        if self._ranks() == 1:
            return
        parts = [p for b in balances for p in (b.load_E, b.counts_EB)]
        flat = torch.cat([p.flatten() for p in parts])
        dist.all_reduce(flat, group=self.group)
        for part, new in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(new.view_as(part))

    def _all_margins(self, balance: RouterBalance) -> Tensor:
        """Margins of all ranks' tokens; ranks may hold different numbers of them."""
        nothing = torch.zeros(0, balance.bias_E.shape[0], device=balance.bias_E.device)
        own_TE = torch.cat([nothing, *balance.margins])
        if self._ranks() == 1:
            return own_TE
        size = torch.tensor([own_TE.shape[0]], device=own_TE.device)
        sizes = [torch.zeros_like(size) for _ in range(self._ranks())]
        dist.all_gather(sizes, size, group=self.group)
        longest = max(int(s) for s in sizes)
        padded = own_TE.new_zeros(longest, own_TE.shape[1])
        padded[: own_TE.shape[0]] = own_TE
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.group)
        return torch.cat([g[: int(s)] for g, s in zip(gathered, sizes, strict=True)])
