"""K3's optimiser: per-head Muon with QK-Clip, and quantile balancing of the experts' load."""

from k3rl.optim.balancing import RouterBalancing
from k3rl.optim.blocks import Block, plan_blocks
from k3rl.optim.config import BalancingChoice, FrozenBalancing, MuonConfig, QuantileBalancing, SignBalancing
from k3rl.optim.muon import Muon, muon_groups
from k3rl.optim.qk_clip import QKClip

__all__ = [
    "BalancingChoice",
    "Block",
    "FrozenBalancing",
    "Muon",
    "MuonConfig",
    "QKClip",
    "QuantileBalancing",
    "RouterBalancing",
    "SignBalancing",
    "muon_groups",
    "plan_blocks",
]
