"""The torch side: turns batches of trajectories or conversations into optimiser steps.

worker = TrainerWorker(ModelConfig(path="k3-nano"), TrainerConfig())
metrics = worker.step(selection.trained)          # RL: trajectories with advantages
metrics = worker.sft_step([(ids, loss_mask, 1.0)])
"""

from typing import TYPE_CHECKING, Any

from k3rl.trainer.examples import Example, SftSequence
from k3rl.trainer.worker import TrainerWorker

if TYPE_CHECKING:
    from k3rl.trainer.group import TrainerGroup

__all__ = ["Example", "SftSequence", "TrainerGroup", "TrainerWorker"]


def __getattr__(name: str) -> Any:
    """`TrainerGroup` needs Ray, one rank does not."""
    if name == "TrainerGroup":
        from k3rl.trainer.group import TrainerGroup

        return TrainerGroup
    raise AttributeError(name)
