"""All objectives as one choice on ``type``, and how a user's own joins them."""

from __future__ import annotations

import importlib
from typing import Annotated, Any, Literal

from pydantic import Field

from k3rl.algorithms.cispo import CispoConfig
from k3rl.algorithms.dapo import DapoConfig
from k3rl.algorithms.divergence import DivergenceConfig
from k3rl.algorithms.dr_grpo import DrGrpoConfig
from k3rl.algorithms.gspo import GspoConfig
from k3rl.algorithms.k25 import K25Config
from k3rl.algorithms.objective import CorrectedConfig, get_objective
from k3rl.algorithms.ppo import GrpoConfig, PpoConfig
from k3rl.algorithms.reinforce import ReinforceConfig
from k3rl.algorithms.rloo import RlooConfig
from k3rl.errors import UserError


class CustomConfig(CorrectedConfig):
    """An objective of your own: a function decorated with ``@objective("name")`` in a module on the path."""

    type: Literal["custom"] = "custom"
    module: str
    """Module to import, in which the function is decorated."""
    name: str
    """The name given to the decorator."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Yours to read in the function, as `config.options`."""

    def load(self) -> None:
        """Import the module and find the function; `UserError` where either is missing."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise UserError(f"objective '{self.name}': no module '{self.module}' ({error})") from error
        get_objective(self.name)


ObjectiveChoice = Annotated[
    K25Config
    | PpoConfig
    | GrpoConfig
    | DrGrpoConfig
    | DapoConfig
    | GspoConfig
    | CispoConfig
    | RlooConfig
    | ReinforceConfig
    | DivergenceConfig
    | CustomConfig,
    Field(discriminator="type"),
]
