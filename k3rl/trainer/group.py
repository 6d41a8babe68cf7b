"""All ranks of the trainer as Ray actors, seen as one: the same methods as `TrainerWorker`.

The driver makes the records, counts what needs the whole batch, gives each rank about equally many tokens
and joins the results. Ranks fill the bundles of a placement group that the recipe owns (colocated or
separate), or plain actors where it gives none.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from k3rl.config.trainer import TrainerConfig
from k3rl.errors import RunError
from k3rl.models import ModelConfig
from k3rl.trainer.diagnostics import diagnose, sft_metrics
from k3rl.trainer.distributed import ShardedWorld, World
from k3rl.trainer.examples import Example, SftInput, from_sft, from_trajectories
from k3rl.trainer.packing import spread
from k3rl.trainer.policy import device_of
from k3rl.trainer.worker import Metrics, StepOutput, TrainerWorker
from k3rl.types import Trajectory
from k3rl.weights import Handshake, Publication


class TrainerRank:
    """What runs inside an actor: joins the process group, then is a `TrainerWorker`."""

    def __init__(self) -> None:
        self.worker: TrainerWorker | None = None

    def address(self) -> str:
        """A free port on this machine, for the process group to meet at."""
        with socket.socket() as s:
            s.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    def start(self, rank: int, address: str, device: str, arguments: dict[str, Any]) -> int:
        """Build model and optimiser; returns the number of parameters that train."""
        place = device_of(device)
        parallel = arguments["config"].parallel
        size = parallel.ranks
        world = World() if size == 1 else ShardedWorld(rank, size, address, place, context=parallel.context)
        self.worker = TrainerWorker(**arguments, device=str(place), world=world)
        return sum(p.numel() for p in self.worker.parameters.values())

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the worker, by name."""
        return getattr(self.worker, method)(*arguments)

    def version(self) -> int:
        """Of the worker's weights."""
        assert self.worker is not None
        return self.worker.version


class TrainerGroup:
    """``placement_group`` with one bundle per rank from ``first_bundle`` on; ``num_cpus``/``num_gpus`` are
    each rank's.

    Calls block until every rank is done, at most ``timeout_s``: then, and where an actor dies, `RunError`
    says which call and rank. Errors of a rank are raised as they are.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TrainerConfig,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        transport: str = "shm",
        handshake: Handshake | None = None,
        packed: bool = False,
        placement_group: PlacementGroup | None = None,
        first_bundle: int = 0,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        device: str = "auto",
        timeout_s: float = 1800.0,
    ) -> None:
        self.config, self.timeout_s = config, timeout_s
        ranks = config.parallel.ranks
        remote = ray.remote(TrainerRank)
        self.ranks = [
            remote.options(
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                scheduling_strategy="DEFAULT"
                if placement_group is None
                else PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=first_bundle + r
                ),
            ).remote()
            for r in range(ranks)
        ]
        address = self._wait([self.ranks[0].address.remote()], "address")[0]
        arguments = {
            "model": model,
            "config": config,
            "seed": seed,
            "temperature": temperature,
            "transport": transport,
            "packed": packed,
            "handshake": handshake,
        }
        place = device if device != "auto" or num_gpus else "cpu"
        self.parameters: int = self._wait(
            [a.start.remote(r, address, place, arguments) for r, a in enumerate(self.ranks)], "start"
        )[0]
        self.version = 0

    def step(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """See `TrainerWorker.step`."""
        examples = from_trajectories(trajectories, self.version)
        outputs = self._shares("step_examples", examples)
        for output in outputs:
            output.columns.give_back(trajectories)
        return diagnose(trajectories, outputs, self.config.objective)

    def sft_step(self, sequences: Sequence[SftInput]) -> Metrics:
        """See `TrainerWorker.sft_step`."""
        return sft_metrics(self._shares("sft_examples", from_sft(sequences)))

    def score(
        self, trajectories: Sequence[Trajectory], temperature: float | None = None
    ) -> list[list[float]]:
        """See `TrainerWorker.score`."""
        shares = self._deal([len(t.prompt_ids) + len(t.token_ids) for t in trajectories])
        rows = self._call_each("score", [([trajectories[i] for i in share], temperature) for share in shares])
        out: list[list[float]] = [[] for _ in trajectories]
        for share, part in zip(shares, rows, strict=True):
            for i, row in zip(share, part, strict=True):
                out[i] = row
        return out

    def publication(self) -> Publication:
        """The present weights, for the rollout workers. Rank 0 owns what it refers to."""
        return self._call_all("publication")[0]

    def save(self, folder: Path | str, tokenizer_dir: Path | str | None = None) -> None:
        """See `TrainerWorker.save`."""
        self._call_all("save", str(folder), None if tokenizer_dir is None else str(tokenizer_dir))

    def wait(self) -> None:
        """Until background saves are on disk."""
        self._call_all("wait")

    def load(self, folder: Path | str) -> None:
        """Exact resume; see `TrainerWorker.load`."""
        self._call_all("load", str(folder))
        self._read_version()

    def sleep(self, keep_weights: bool = False) -> None:
        """Free device memory for rollout: weights and optimiser state go to host memory; see `TrainerWorker.sleep`."""
        self._call_all("sleep", keep_weights)

    def wake(self) -> None:
        """The reverse of `sleep`."""
        self._call_all("wake")

    def device_bytes(self) -> int:
        """What all processes together hold of the fullest GPU of a rank; 0 on a CPU."""
        return max(self._call_all("device_bytes"))

    def close(self) -> None:
        """Finish background work and stop the actors."""
        self._call_all("close")
        for actor in self.ranks:
            ray.kill(actor)

    def _deal(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices by rank; ranks that share sequences get the same ones."""
        context = self.config.parallel.context
        shares = spread(lengths, len(self.ranks) // context)
        return [share for share in shares for _ in range(context)]

    def _shares(self, method: str, examples: Sequence[Example]) -> list[StepOutput]:
        shares = self._deal([len(e) for e in examples])
        outputs = self._call_each(method, [([examples[i] for i in share],) for share in shares])
        self._read_version()
        return outputs

    def _read_version(self) -> None:
        versions = set(self._wait([a.version.remote() for a in self.ranks], "version"))
        if len(versions) != 1:
            raise RunError(f"the trainer's ranks are at different versions: {sorted(versions)}")
        self.version = versions.pop()

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._call_each(method, [arguments] * len(self.ranks))

    def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        refs = [a.call.remote(method, *args) for a, args in zip(self.ranks, arguments, strict=True)]
        return self._wait(refs, method)

    def _wait(self, refs: list[Any], what: str) -> list[Any]:
        """Results in rank order. One rank's error doesn't wait for the others, which may hang in a
        collective.
        """
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=self.timeout_s)
            if not done:
                late = [refs.index(r) for r in pending]
                raise RunError(f"trainer: '{what}' of ranks {late} took more than {self.timeout_s:.0f} s")
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.as_instanceof_cause() from None
            except ray.exceptions.RayActorError as error:
                raise RunError(f"trainer: rank {refs.index(done[0])} died in '{what}': {error}") from error
        return ray.get(refs)
