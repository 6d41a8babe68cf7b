"""Objectives, advantages and their options: pure functions of records, without models, Ray or files.

algorithm = Algorithm(K25Config())
selection = algorithm.batch(groups)      # advantages; what is trained, what is dropped and why
output = algorithm.loss(token_batch)     # LossOutput(loss_sum, token_count, denominator, metrics)
"""

from k3rl.algorithms.advantages import advantages, zero_variance
from k3rl.algorithms.algorithm import Algorithm, Selection
from k3rl.algorithms.batch import LossOutput, Sum, TokenBatch, TokenLoss
from k3rl.algorithms.config import CustomConfig, ObjectiveChoice
from k3rl.algorithms.k25 import K25Config
from k3rl.algorithms.objective import ObjectiveConfig, compute_loss, get_objective, objective

__all__ = [
    "Algorithm",
    "CustomConfig",
    "K25Config",
    "LossOutput",
    "ObjectiveChoice",
    "ObjectiveConfig",
    "Selection",
    "Sum",
    "TokenBatch",
    "TokenLoss",
    "advantages",
    "compute_loss",
    "get_objective",
    "objective",
    "zero_variance",
]
