"""One rank of the trainer: model, optimiser, and what is done with a batch.

A plain class. Alone it needs no process group; with several ranks `TrainerGroup` starts one per actor and
gives each its share of the examples. Whatever the cut, the update is the same: losses are sums, divided by
a count that is known for the whole batch before the first pass and checked against what the passes counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3rl.algorithms import Algorithm, LossOutput, Sum, TokenBatch
from k3rl.config.trainer import TrainerConfig
from k3rl.errors import RunError, UserError
from k3rl.models import LanguageModel, ModelConfig, load_model
from k3rl.optim import RouterBalancing
from k3rl.quant import qat
from k3rl.quant.packed import expert_rule, packed_weights
from k3rl.trainer import checkpoint, context, memory, offload, packing
from k3rl.trainer.diagnostics import Columns, diagnose, sft_metrics
from k3rl.trainer.distributed import World
from k3rl.trainer.examples import (
    Example,
    SftInput,
    denominator,
    from_sft,
    from_trajectories,
    sampled_positions,
)
from k3rl.trainer.experts import ExpertWatch, engine_read, engine_routing
from k3rl.trainer.lora import add_adapters
from k3rl.trainer.optimizer import Masters, build_optimizer, clip_gradients, rate, set_rate
from k3rl.trainer.policy import Policy, device_of, trainable, whole_weights
from k3rl.types import Trajectory
from k3rl.weights import Canary, Handshake, Publication, Publisher, canary_sequences, make_transport
from k3rl.weights.transports import Transport

Metrics = dict[str, float]
log = logging.getLogger("k3rl.trainer")


@dataclass(slots=True)
class StepOutput:
    """One rank's part of a step. ``columns`` are of its own examples, at the policy before the update."""

    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    updates: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds_s: float = 0.0
    peak_bytes: int = 0
    sums: dict[str, Sum] = field(default_factory=dict)
    columns: Columns = field(default_factory=Columns)


class TrainerWorker:
    """``temperature`` is the sampler's: both sides score the same distribution. ``packed``: routed experts, which the
    model fake-quantises, are published as MXFP4 codes and scales. Raises `UserError` for a bad config or model.
    """

    def __init__(
        self,
        model: ModelConfig | LanguageModel,
        config: TrainerConfig,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        device: str = "auto",
        world: World | None = None,
        transport: Transport | str = "shm",
        handshake: Handshake | None = None,
        packed: bool = False,
    ) -> None:
        self.config, self.seed = config, seed
        self.qat = model.qat if isinstance(model, ModelConfig) else None
        self.world = world or World()
        self.device = device_of(device)
        if config.threads:
            torch.set_num_threads(config.threads)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(seed)
        self.model = load_model(model, self.device, seed=seed) if isinstance(model, ModelConfig) else model
        self.model.train()
        if reason := context.check(self.model, self.world):
            raise UserError(reason)
        self.dtypes = {name: t.dtype for name, t in self.model.named_weights()}
        if config.lora is not None:
            if self.world.size > 1:
                raise UserError("trainer.lora: adapters train on one rank (parallel.ranks = 1)")
            add_adapters(self.model, config.lora, seed)
        self.policy = self.world.shard(
            Policy(self.model, temperature, config.logprob_chunk_mb << 20), config.parallel
        )
        self.parameters = trainable(self.policy)
        if not self.parameters:
            raise UserError("the model has no parameter that trains")
        self.masters = Masters(self.parameters, config.master_weights)
        log.info(str(memory.plan(self.model, config, self.device, self.world.size)))
        self.optimizer = build_optimizer(config.optimizer, self.masters.targets, self.policy)
        self.balancing = RouterBalancing(self.model, config.balancing)
        self.algorithm = Algorithm(config.objective)
        self.experts = ExpertWatch(self.model)
        if isinstance(transport, str):
            transport = make_transport(transport)
        self._background = checkpoint.Background()
        self.publisher = Publisher(transport, handshake)
        self.packed = expert_rule(self.model) if packed else None
        self.version = 0
        """Optimiser steps behind the weights."""

    # -- RL

    def step(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Train on trajectories that carry advantages, and return what there is to know (docs/metrics.md).

        Fills ``trainer_logprobs`` of each: the policy's log-probs before the update. Raises `ValueError`
        for records whose fields don't fit, `RunError` where the gradient isn't finite; weights are then as
        they were.
        """
        output = self.step_examples(from_trajectories(trajectories, self.version))
        output.columns.give_back(trajectories)
        return diagnose(trajectories, [output], self.config.objective)

    def step_examples(self, examples: Sequence[Example]) -> StepOutput:
        """A rank's share of a step: one or more optimiser steps (`minibatches` x `epochs`)."""
        started, output = self._begin()
        parts = self._minibatches(examples)
        first = {e.key: i for i, e in enumerate(examples)}
        output.columns = Columns.empty(examples)
        if len(parts) > 1:
            old = self._score(examples)
            parts = [[_with_old(e, old[first[e.key]]) for e in part] for part in parts]
        for number, part in enumerate(parts):
            keep = output.columns if number < self.config.minibatches else None
            self._update(part, output, keep)
        return self._end(started, output)

    def _minibatches(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Groups stay whole; the order is a function of seed and version."""
        count, epochs = self.config.minibatches, self.config.epochs
        if count == 1:
            return [list(examples)] * epochs
        parts: list[list[Example]] = []
        for epoch in range(epochs):
            groups = self.world.union({e.group for e in examples})
            order = np.random.default_rng([self.seed, self.version, epoch]).permutation(groups)
            owner = {int(g): i % count for i, g in enumerate(order)}
            parts += [[e for e in examples if owner[e.group] == p] for p in range(count)]
        return parts

    def _update(self, examples: Sequence[Example], output: StepOutput, keep: Columns | None) -> None:
        objective = self.config.objective

        def loss(
            micro: packing.MicroBatch, logprobs_P: Tensor, entropy_P: Tensor, requested_PK: Tensor | None
        ) -> LossOutput:
            if keep is not None:
                keep.take(micro.examples, logprobs_P, entropy_P)
            return self.algorithm.loss(token_batch(micro, logprobs_P, entropy_P, requested_PK))

        share = denominator(examples, objective.normalisation, objective.constant_tokens)
        self._train(examples, share, loss, output, entropy_gradient=objective.entropy_bonus > 0)

    # -- SFT

    def sft_step(self, sequences: Sequence[SftInput]) -> Metrics:
        """One optimiser step of weighted cross-entropy, per token over the whole batch."""
        return sft_metrics([self.sft_examples(from_sft(sequences))])

    def sft_examples(self, examples: Sequence[Example]) -> StepOutput:
        """A rank's share of an SFT step."""
        started, output = self._begin()

        def loss(
            micro: packing.MicroBatch, logprobs_P: Tensor, entropy_P: Tensor, _: Tensor | None
        ) -> LossOutput:
            weight_P = micro.repeat([e.weight for e in micro.examples], logprobs_P.dtype)
            metrics = {"entropy": Sum.over(entropy_P), "nll": Sum.over(-logprobs_P)}
            total = float(weight_P.double().sum())
            return LossOutput(-(weight_P * logprobs_P).sum(), len(logprobs_P), total, metrics)

        share = float(sum(e.weight * e.sequence_tokens for e in examples))
        self._train(examples, share, loss, output)
        return self._end(started, output)

    # -- scoring

    def score(
        self, trajectories: Sequence[Trajectory], temperature: float | None = None
    ) -> list[list[float]]:
        """Log-probs of each trajectory's sampled tokens under the present weights, in their order."""
        examples = [
            Example(t.id, np.asarray([*t.prompt_ids, *t.token_ids], np.int64), sampled_positions(t))
            for t in trajectories
        ]
        return [row.tolist() for row in self._score(examples, temperature)]

    @torch.no_grad()
    def _score(self, examples: Sequence[Example], temperature: float | None = None) -> list[np.ndarray]:
        scored: list[np.ndarray] = [np.zeros(e.sequence_tokens, np.float32) for e in examples]
        index = {id(e): i for i, e in enumerate(examples)}
        for micro in self._passes([e for e in examples if e.sequence_tokens]):
            logprobs_P, _, _ = self._forward(micro, False, temperature)
            for e, row in zip(micro.examples, _split(micro, logprobs_P), strict=True):
                if id(e) in index:
                    scored[index[id(e)]] = row
        return scored

    # -- weights

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and whole tensors in the dtype they were loaded in; every rank must iterate in
        step.
        """
        return whole_weights(self.policy, self.model, self.dtypes)

    def score_ids(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """Log-probs (temperature 1) of ``sequence[start:]``, as `Engine.score` gives them; ``start`` >= 1."""
        examples = [
            Example("", np.asarray(ids, np.int64), np.arange(start, len(ids), dtype=np.int64))
            for ids, start in zip(sequences, starts, strict=True)
        ]
        return [row.tolist() for row in self._score(examples, 1.0)]

    def canary(self) -> Canary:
        """Fixed sequences and their log-probs under the present weights."""
        sequences = canary_sequences(self.model.vocab_size)
        starts = [1] * len(sequences)
        rows = self.score_ids(sequences, starts)
        return Canary(sequences, tuple(starts), tuple(tuple(row) for row in rows))

    def publication(self) -> Publication | None:
        """The present weights through the worker's transport; ``None`` on ranks other than 0."""
        canary = self.canary()
        if self.world.rank == 0:
            weights = self.named_weights()
            if self.packed:
                weights = packed_weights(weights, self.packed)
            return self.publisher.publish(weights, self.version, canary)
        for _ in self.named_weights():
            pass
        return None

    def save(self, folder: Path | str, tokenizer_dir: Path | str | None = None) -> None:
        """See `k3rl.trainer.checkpoint`. In the background where the config says so; `wait` for it before
        exit.
        """
        if self.config.checkpoint.asynchronous and self.world.size == 1:
            self._background.start(checkpoint.save_snapshot(self, folder, tokenizer_dir, copy=True))
        else:
            checkpoint.save(self, folder, tokenizer_dir)

    def wait(self) -> None:
        """Until a background save is on disk; raises what went wrong with it."""
        self._background.wait()

    def load(self, folder: Path | str) -> None:
        """Exact resume from a folder that `save` wrote, with any number of ranks."""
        checkpoint.load(self, folder)

    # -- taking turns on one device

    def sleep(self, keep_weights: bool = False) -> None:
        """Weights and optimiser state to host memory; nothing to do on a CPU. Ends the last publication.
        ``keep_weights``: those stay, to be published.
        """
        self.publisher.close()
        if self.device.type == "cuda":
            policy = None if keep_weights else self.policy
            offload.move(policy, self.masters, self.optimizer, torch.device("cpu"))

    def wake(self) -> None:
        """The reverse of `sleep`."""
        if self.device.type == "cuda":
            offload.move(self.policy, self.masters, self.optimizer, self.device)

    def device_bytes(self) -> int:
        """What all processes together hold of this rank's GPU; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def close(self) -> None:
        """Finish background work and leave the process group."""
        self.wait()
        self.publisher.close()
        self.world.close()

    # -- the step itself

    def _passes(self, examples: Sequence[Example]) -> list[packing.MicroBatch]:
        """Micro-batches, as many as the rank that has most: collectives must meet. Missing ones hold one
        lossless token pair.
        """
        longest = max((len(e) for e in examples), default=0)
        if longest > self.model.max_context:
            limit = self.model.max_context
            raise ValueError(f"a sequence of {longest} tokens exceeds the model's context of {limit}")
        budget = self.config.micro_batch_tokens if self.world.context is None else 1  # one sequence each
        bins = packing.plan([len(e) for e in examples], budget)
        passes = [[examples[i] for i in b] for b in bins]
        passes += [[_IDLE]] * (self.world.most(len(passes)) - len(passes))
        return [packing.build(p, self.device) for p in passes]

    def _forward(
        self,
        micro: packing.MicroBatch,
        entropy_gradient: bool,
        temperature: float | None = None,
        requested: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        part = context.part_of(micro, self.world)
        recorded = part.of_tokens(engine_routing(micro))
        replay = recorded if self.config.replay_routing else None
        read = part.of_tokens(engine_read(micro))
        with part.sharing(), self.experts.watch(recorded, read, part.tokens):
            logprobs_P, entropy_P, requested_PK = self.policy(
                part.ids_T,
                part.cu_N1,
                part.predict_P,
                part.targets_P,
                entropy_gradient,
                temperature,
                replay,
                part.of_rows(micro.column("teacher_ids", torch.int64)) if requested else None,
            )
        return part.whole(logprobs_P), part.whole(entropy_P), part.whole(requested_PK)

    def _train(self, examples, share, loss, output: StepOutput, entropy_gradient: bool = False) -> None:
        """Accumulate the gradient of sum / global denominator over all passes, then one optimiser step."""
        total = self.world.total(share)
        if total == 0:
            return  # nothing carries loss anywhere: no update, no new version
        counted = torch.zeros((), dtype=torch.float64)
        self.optimizer.zero_grad(set_to_none=True)
        self.experts.reset()
        self.balancing.reset()
        for micro in self._passes(examples):
            self.balancing.counting(micro.examples[0] is not _IDLE)
            requested = all(e.teacher_ids is not None for e in micro.examples)
            logprobs_P, entropy_P, requested_PK = self._forward(micro, entropy_gradient, requested=requested)
            if micro.examples[0] is _IDLE:
                (logprobs_P.sum() * 0.0).backward()
                continue
            result: LossOutput = loss(micro, logprobs_P, entropy_P, requested_PK)
            (result.loss_sum / total).backward()
            counted += result.denominator
            output.loss += float(result.loss_sum.detach()) / total
            output.tokens += micro.tokens
            output.trained_tokens += result.token_count
            for name, value in result.metrics.items():
                output.sums[name] = output.sums[name] + value if name in output.sums else value
        if not math.isclose(float(counted), share, rel_tol=1e-9, abs_tol=1e-9):
            raise RunError(f"the loss counted {float(counted)} in its denominator, the batch has {share}")
        output.sums |= self.experts.metrics(self.world.context)
        self._apply(output)

    def _begin(self) -> tuple[float, StepOutput]:
        memory.start_peak(self.device)
        return time.monotonic(), StepOutput()

    def _end(self, started: float, output: StepOutput) -> StepOutput:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        output.seconds_s = time.monotonic() - started
        output.peak_bytes = memory.peak_bytes(self.device)
        for name, (total, count) in qat.statistics(self.model).items():
            output.sums[name] = Sum(torch.tensor(total), torch.tensor(count))
        return output if self.world.leads else _unsaid(output)

    def _apply(self, output: StepOutput) -> None:
        targets = self.masters.targets
        output.grad_norm = clip_gradients(targets.values(), self.config.grad_clip)
        if not math.isfinite(output.grad_norm):
            finite = lambda p: p.grad is None or bool(torch.isfinite(p.grad).all())  # noqa: E731
            where = next((name for name, p in targets.items() if not finite(p)), "the norm")
            self.optimizer.zero_grad(set_to_none=True)
            raise RunError(f"the gradient isn't finite at version {self.version}: {where}")
        output.learning_rate = set_rate(self.optimizer, rate(self.config.schedule, self.version))
        self.optimizer.step()
        self.balancing.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.publish()
        self.version += 1
        output.updates += 1


def _unsaid(output: StepOutput) -> StepOutput:
    """Without what the leader of the ranks that share their sequences says for all of them."""
    return replace(output, loss=0.0, tokens=0, trained_tokens=0, sums={}, columns=Columns())


# A pass without loss, for ranks that have fewer passes than others: one token that predicts another.
_IDLE = Example("", np.zeros(2, np.int64), np.ones(1, np.int64))


def token_batch(
    micro: packing.MicroBatch, logprobs_P: Tensor, entropy_P: Tensor, requested_PK: Tensor | None = None
) -> TokenBatch:
    """What an objective sees of a micro-batch: only tokens with loss."""
    examples, f = micro.examples, logprobs_P.dtype
    optional = {
        name: micro.column(field, f) if all(getattr(e, field) is not None for e in examples) else None
        for name, field in (
            ("old_logprobs_T", "old"),
            ("reference_logprobs_T", "reference"),
            ("teacher_TK", "teacher"),
        )
    }
    return TokenBatch(
        logprobs_T=logprobs_P,
        behaviour_logprobs_T=micro.column("behaviour", f),
        advantages_T=micro.column("advantage", f),
        mask_T=torch.ones(len(logprobs_P), dtype=torch.bool, device=logprobs_P.device),
        sequence_T=micro.repeat(range(len(examples)), torch.int64),
        sequence_tokens_T=micro.repeat([e.sequence_tokens for e in examples], torch.int64),
        group_tokens_T=micro.repeat([e.group_tokens for e in examples], torch.int64),
        staleness_T=micro.column("staleness", torch.int64),
        entropy_T=entropy_P,
        student_TK=requested_PK,
        **optional,
    )


def _split(micro: packing.MicroBatch, values_P: Tensor) -> list[np.ndarray]:
    ends = np.cumsum([e.sequence_tokens for e in micro.examples])[:-1]
    return np.split(values_P.detach().float().cpu().numpy(), ends)


def _with_old(example: Example, old: np.ndarray) -> Example:
    return replace(example, old=old)
