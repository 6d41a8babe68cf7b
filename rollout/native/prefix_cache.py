"""Prefix cache for models that keep per-token entries (K/V, latents) and running states (KDA, convolutions).

Source: spec/06 §13.1 (report §5.4.1). Per-token entries can be reused up to any token; a running state only
where it was saved. So a prefix is reusable exactly up to a boundary at which both exist. Entries are kept
in blocks of a tree keyed by the tokens; states are checkpointed sparsely: at the interval the engine asks
for, where a later one on the same path replaces an earlier one nobody else branches from, and at the ends
of turns, which are kept, since the next turn starts there. Look-up has two stages: longest match of tokens,
then the last boundary at or below it.

Trees are per policy version: nothing made by other weights can match (spec/10 row 16).

Owner: the engine. `save` copies out of a slot, `load` copies into one; nothing here is ever written by a
running sequence. Bytes are bounded; least recently used leaves go first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from k3rl.models.cache import Cache

Tensors = dict[str, torch.Tensor]


def _nbytes(tensors: Tensors | None) -> int:
    return sum(t.numel() * t.element_size() for t in (tensors or {}).values())


@dataclass(slots=True)
class _Tail:
    """A boundary inside a block: the end of a turn."""

    tokens: tuple[int, ...]
    entries: Tensors
    states: Tensors
    used: int


@dataclass(slots=True, eq=False)
class _Node:
    """One block of tokens after its parent's."""

    parent: _Node | None
    tokens: tuple[int, ...]
    entries: Tensors
    states: Tensors | None = None  # at the block's end, where checkpointed
    turn_end: bool = False
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    tails: dict[tuple[int, ...], _Tail] = field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """``block_tokens`` tokens are one block; ``max_bytes`` bounds entries and states together."""

    def __init__(self, max_bytes: int, block_tokens: int = 64) -> None:
        self.block_tokens, self.max_bytes = block_tokens, max_bytes
        self.nbytes = 0
        self.hit_tokens = 0
        self._roots: dict[int, _Node] = {}
        self._clock = 0

    def clear(self) -> None:
        self._roots.clear()
        self.nbytes = 0

    def save(self, cache: Cache, slot: int, ids: list[int], version: int, turn_end: bool) -> None:
        """Make ``ids`` reusable: they are what ``slot`` holds, all of it."""
        self._clock += 1
        size, length = self.block_tokens, len(ids)
        node = self._roots.setdefault(version, _Node(None, (), {}))
        for start in range(0, length - size + 1, size):
            node = self._child(node, tuple(ids[start : start + size]), cache, slot, start)
        rest = tuple(ids[length - length % size :])
        if not rest:
            self._checkpoint(node, cache, slot, turn_end)
        elif turn_end and rest not in node.tails:
            entries = self._entries(cache, slot, length - len(rest), length)
            tail = _Tail(rest, entries, self._states(cache, slot), self._clock)
            node.tails[rest] = tail
            self.nbytes += _nbytes(tail.entries) + _nbytes(tail.states)
        self._evict()

    def _child(self, node: _Node, tokens: tuple[int, ...], cache: Cache, slot: int, start: int) -> _Node:
        child = node.children.get(tokens)
        if child is None:
            entries = self._entries(cache, slot, start, start + len(tokens))
            child = node.children[tokens] = _Node(node, tokens, entries)
            self.nbytes += _nbytes(entries)
        child.used = self._clock
        return child

    def _checkpoint(self, node: _Node, cache: Cache, slot: int, turn_end: bool) -> None:
        node.turn_end = node.turn_end or turn_end
        if node.states is None and node.parent is not None:
            node.states = self._states(cache, slot)
            self.nbytes += _nbytes(node.states)
        self._supersede(node)

    def _supersede(self, node: _Node) -> None:
        """Drop the states above a new one that nobody needs now: all but those where a turn ended, and the last
        one at or above each branch, where the other path goes on from."""
        branched, ancestor = False, node.parent
        while ancestor is not None:
            branched = branched or len(ancestor.children) > 1
            if ancestor.states is not None:
                if not (branched or ancestor.turn_end):
                    self.nbytes -= _nbytes(ancestor.states)
                    ancestor.states = None
                branched = False
            ancestor = ancestor.parent

    @staticmethod
    def _entries(cache: Cache, slot: int, start: int, end: int) -> Tensors:
        return {name: t[slot, start:end].clone() for name, t in cache.tokens.items()}

    @staticmethod
    def _states(cache: Cache, slot: int) -> Tensors:
        return {name: t[slot].clone() for name, t in cache.states.items()}

    def load(self, cache: Cache, slot: int, ids: list[int], version: int) -> int:
        """Put the longest reusable proper prefix of ``ids`` into the slot; returns its length, 0 for none.

        Proper, since the last token must be computed to be sampled after.
        """
        self._clock += 1
        length, path, tail = self._find(ids, version, stateless=not cache.states)
        if not length:
            return 0
        parts = [node.entries for node in path] + ([tail.entries] if tail else [])
        state = {name: torch.cat([p[name] for p in parts]) for name in cache.tokens}
        if cache.states:
            state |= tail.states if tail else path[-1].states
        state["length"] = torch.tensor(length)
        cache.import_(slot, state)
        self.hit_tokens += length
        return length

    def _find(self, ids: list[int], version: int, stateless: bool) -> tuple[int, list[_Node], _Tail | None]:
        """Longest match by tokens; on its path, the last boundary where entries and state both exist."""
        node, path, size, limit = self._roots.get(version), [], self.block_tokens, len(ids) - 1
        best: tuple[int, list[_Node], _Tail | None] = (0, [], None)
        while node is not None:
            node.used, depth = self._clock, len(path) * size
            if path and (stateless or node.states is not None):
                best = (depth, list(path), None)
            for tail in node.tails.values():
                end = depth + len(tail.tokens)
                if best[0] < end <= limit and tuple(ids[depth:end]) == tail.tokens:
                    tail.used = self._clock
                    best = (end, list(path), tail)
            block = tuple(ids[depth : depth + size]) if depth + size <= limit else ()
            node = node.children.get(block)
            if node is not None:
                path.append(node)
        return best

    def _evict(self) -> None:
        if self.nbytes <= self.max_bytes:
            return
        target = int(self.max_bytes * 0.9)
        while self.nbytes > target:
            oldest = min(self._leaves(), key=lambda leaf: leaf[0], default=None)
            if oldest is None:
                return
            _, owner, key, leaf = oldest
            if isinstance(leaf, _Tail):
                del owner.tails[key]
            else:
                del owner.children[key]
            self.nbytes -= _nbytes(leaf.entries) + _nbytes(leaf.states)

    def _leaves(self) -> list[tuple[int, _Node, tuple[int, ...], _Tail | _Node]]:
        """What nothing else depends on: tails, and nodes with neither children nor tails."""
        found, stack = [], list(self._roots.values())
        while stack:
            node = stack.pop()
            found += [(tail.used, node, key, tail) for key, tail in node.tails.items()]
            if node.parent is not None and not node.children and not node.tails:
                found.append((node.used, node.parent, node.tokens, node))
            stack += node.children.values()
        return found
