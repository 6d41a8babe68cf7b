"""Who runs and who waits: slots, admission, preemption by recompute, kept caches.

Owner: the engine, which puts sequences in and takes them out; this decides which of them have a slot. Queue
order is age: whoever gives way, or comes back after its leader left, stands before everything younger.
"""

from __future__ import annotations

from collections import deque

import torch

from rollout.native.prefix_cache import PrefixCache
from rollout.native.runner import ModelRunner
from rollout.native.sequence import Sequence, SlotTable
from rollout.native.throttle import Throttle


class SlotPool:
    """Waiting and running sequences over the slots of the runner's cache.

    ``epoch`` changes whenever a slot changes hands: what was put together for a step is then out of date.
    ``kept`` holds exported caches of paused generations by their id.
    """

    def __init__(self, runner: ModelRunner, prefixes: PrefixCache | None) -> None:
        self.runner, self.prefixes = runner, prefixes
        self.table = SlotTable(runner.max_slots)
        self.throttle = Throttle(runner.max_slots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.kept: dict[str, dict[str, torch.Tensor]] = {}
        self.epoch = 0
        self._free: list[int] = []

    def utilisation(self) -> float:
        """Share of the KV budget that the running sequences claim, each being as wide as the longest."""
        longest = max((len(s.ids) for s in self.running), default=0)
        return len(self.running) * longest / self.runner.kv_budget_tokens

    # -- in ------------------------------------------------------------------------------------------------

    def admit(self, version: int) -> None:
        """Give slots to waiting sequences, oldest first, as the throttle allows; twins join their leader."""
        if not self.waiting:
            return
        if self.runner.cache is None:
            self.runner.open_cache(len(self.waiting[0].ids) + 1)
            self._free = list(range(self.runner.num_slots))[::-1]
        limit = self.throttle.limit(len(self.running), len(self.waiting), self.utilisation())
        placed: list[Sequence] = []
        while self.waiting and self._free and len(self.running) < limit:
            sequence = self.waiting[0]
            if len(sequence.ids) >= self.runner.width and not self._widen_to_admit(len(sequence.ids) + 1):
                break
            self.waiting.popleft()
            self._place(sequence)
            placed.append(sequence)
            self._resume(sequence, version)
            while (
                sequence.missing > 1
                and self._free
                and len(self.running) < limit
                and self._twin_next(sequence)
            ):
                twin = self.waiting.popleft()
                twin.leader = sequence
                sequence.twins.append(twin)
                self._place(twin)
        fresh = [s.slot for s in placed if s.filled == 0]
        if (
            fresh
        ):  # all at once; what was imported or will be copied into has been, or will be, cleared by that
            self.runner.cache.reset(fresh)

    def _twin_next(self, sequence: Sequence) -> bool:
        if not self.waiting:
            return False
        other = self.waiting[0]
        return other.ids == sequence.ids and other.generation.id not in self.kept

    def _place(self, sequence: Sequence) -> None:
        sequence.slot, sequence.filled = self._free.pop(), 0
        self.table.set(sequence.slot, sequence.generation)
        self.running.append(sequence)
        self.epoch += 1

    def _resume(self, sequence: Sequence, version: int) -> None:
        """Spare it what was computed before: its own kept cache, or a prefix of its tokens."""
        kept = self.kept.pop(sequence.generation.id, None)
        if kept is not None and int(kept["length"]) == len(sequence.ids) - 1:
            self.runner.cache.import_(sequence.slot, kept)
            sequence.filled = len(sequence.ids) - 1
        elif self.prefixes is not None:
            sequence.filled = self.prefixes.load(self.runner.cache, sequence.slot, sequence.ids, version)

    def spread(self, leader: Sequence) -> list[Sequence]:
        """Copy a finished prefill to the slots of its twins, which then live on their own."""
        twins, leader.twins = leader.twins, []
        if twins:
            self.runner.cache.copy(leader.slot, [t.slot for t in twins])
        for twin in twins:
            twin.leader, twin.filled = None, leader.filled
            if leader.routing.array is not None:  # what a resumed twin noted before stays its own
                twin.record(leader.routing.array)
        return twins

    # -- out -----------------------------------------------------------------------------------------------

    def remove(self, sequence: Sequence) -> None:
        """Out for good, running or waiting."""
        if sequence.slot >= 0:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Give the slot back. Twins that still wait for this one's prefill go back to the queue."""
        self._free.append(sequence.slot)
        self.running.remove(sequence)
        sequence.slot, sequence.filled = -1, 0
        self.epoch += 1
        if sequence.leader is not None:
            sequence.leader.twins.remove(sequence)
            sequence.leader = None
        twins, sequence.twins = sequence.twins, []
        for twin in twins:
            twin.leader = None
            self._requeue(twin)

    def _requeue(self, sequence: Sequence) -> None:
        """Preempt: its slot is given back, and it is recomputed before anything younger starts."""
        if sequence.slot >= 0:
            self._vacate(sequence)
        younger = (i for i, other in enumerate(self.waiting) if other.order > sequence.order)
        self.waiting.insert(next(younger, len(self.waiting)), sequence)

    def preempt_down_to(self, count: int) -> None:
        """The youngest give way until so many run."""
        for sequence in sorted(self.running, key=lambda s: s.order)[count:][::-1]:
            if sequence.slot >= 0:  # a twin may have left with its leader
                self._requeue(sequence)

    def clear(self, keep_cache: bool) -> None:
        """Take everything out; with ``keep_cache`` whoever decodes leaves its cache on the host."""
        if keep_cache:
            for sequence in self.running:
                if sequence.missing == 1 and sequence.generation.token_ids:
                    state = self.runner.cache.export(sequence.slot)
                    self.kept[sequence.generation.id] = {k: v.cpu() for k, v in state.items()}
        self.waiting.clear()
        self.running.clear()
        if self.runner.rest_cache():
            self._free = list(range(self.runner.num_slots))[::-1]
        self.throttle.reset()
        self.epoch += 1

    # -- width ---------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Widen the cache before a sequence outgrows its slot. A wider cache has fewer slots where the budget
        binds: the youngest give way."""
        longest = max((len(s.ids) for s in self.running), default=0)
        if longest <= self.runner.width:
            return
        room = self.runner.slots_at(self.runner.width_for(longest))
        if len(self.running) > room:
            self.preempt_down_to(room)
            self.throttle.preempted(len(self.running))
        self._widen(longest)

    def _widen_to_admit(self, longest: int) -> bool:
        """For a newcomer nobody gives way: false where there is no room."""
        if len(self.running) + 1 > self.runner.slots_at(self.runner.width_for(longest)):
            return False
        self._widen(longest)
        return True

    def _widen(self, longest: int) -> None:
        moved = self.runner.widen(longest, [s.slot for s in self.running])
        for sequence in self.running:
            sequence.slot = moved[sequence.slot]
        for sequence in self.running:
            self.table.set(sequence.slot, sequence.generation)
        self._free = list(range(len(self.running), self.runner.num_slots))[::-1]
        self.epoch += 1
