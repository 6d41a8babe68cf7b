"""`TeacherPool`: questions to many teachers, wherever they live, answered while others are still being asked.

    pool = TeacherPool(teachers, device="cpu")       # after ray.init
    ticket = pool.ask(3, ids, start)                           # teacher 3's log-probs of ids[start:]
    pool.work()                                                # now and then: sends what fills a batch
    scores = pool.answers()                                    # of all that was asked, by ticket

Who owns a question: the pool, from `ask` until `answers` returns its row, once. Local teachers live in Ray actors that
serve one teacher after the other; a call goes to an idle actor with the questions of one teacher, preferably of the one
whose weights are in place. An actor that dies or is silent is started again and asked again.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from distill.remote import RemoteScorer
from distill.routing import Routing
from distill.teachers import Scores, Teachers
from k3rl.config.distill import TeacherConfig, TeacherPoolConfig
from k3rl.errors import RunError

ATTEMPTS = 3
WORTH_A_SWAP_TOKENS, WORTH_A_CALL_TOKENS = 4096, 512
"""So many tokens for one teacher are sent while more may come."""
POLL_S = 0.05


@dataclass(slots=True)
class _Question:
    ticket: int
    index: int
    ids: list[int]
    start: int
    key: bytes
    attempts: int = 0


@dataclass(slots=True)
class _Actor:
    """``call`` is under way since ``since_s``, for ``questions``."""

    indices: list[int]
    handle: Any = None
    call: Any = None
    since_s: float = 0.0
    questions: list[_Question] = field(default_factory=list)
    last: int = -1


class TeacherPool:
    """Needs a running Ray where a teacher is local. `handshake` of remote ones is the caller's, before all else."""

    def __init__(
        self,
        teachers: Sequence[TeacherConfig],
        device: str,
        max_context: int | None = None,
        config: TeacherPoolConfig | None = None,
        remote: dict[int, RemoteScorer] | None = None,
        top_k: int | None = None,
    ) -> None:
        """``top_k``: also each position's so many likeliest ids; 0: all."""
        self._top_k = top_k
        self.config = config or TeacherPoolConfig()
        routing = Routing(teachers)
        self._weights = routing.weights
        """By teacher, the number of its weights: teachers that share a checkpoint share questions too."""
        self._remote = {self._weights[i]: scorer for i, scorer in (remote or {}).items()}
        self._models = {self._weights[i]: t.model for i, t in enumerate(teachers) if t.remote is None}
        self._device, self._max_context = device, max_context
        swaps = self.config.storage == "mxfp4" or (device != "cpu" and len(self._models) > 1)
        self._full_tokens = WORTH_A_SWAP_TOKENS if swaps else WORTH_A_CALL_TOKENS
        self._options = {"num_cpus": 1, "num_gpus": 0.1 if device == "cuda" else 0}
        local = sorted(self._models)
        count = min(self.config.actors, len(local))
        self._actors = [_Actor(local[i::count]) for i in range(count)]
        for actor in self._actors:
            self._start(actor)
        self._waiting: dict[int, list[_Question]] = defaultdict(list)
        self._futures: dict[int, tuple[_Question, Future[Scores]]] = {}
        self._rows: dict[int, Scores] = {}
        self._cache: OrderedDict[bytes, Scores] = OrderedDict()
        self._tickets = 0
        self.deaths = self.hits = self.asked = 0

    # -- questions

    def ask(self, teacher: int, ids: list[int], start: int) -> int:
        """Ticket of a question to a teacher, by its number. `ValueError` where nothing precedes the first token."""
        if not 1 <= start < len(ids):
            raise ValueError(f"a sequence of {len(ids)} tokens cannot be scored from {start}")
        index, ticket = self._weights[teacher], self._tickets
        self._tickets += 1
        self.asked += 1
        content = repr((index, start, ids)).encode()
        question = _Question(ticket, index, ids, start, hashlib.blake2b(content, digest_size=16).digest())
        if question.key in self._cache:
            self._cache.move_to_end(question.key)
            self.hits += 1
            self._rows[ticket] = self._cache[question.key]
        elif index in self._remote:
            self._futures[ticket] = question, self._remote[index].submit(ids, start, self._top_k or 0)
        else:
            self._waiting[index].append(question)
        return ticket

    def work(self, everything: bool = False, wait_s: float = 0.0) -> None:
        """Take what is answered, send what can be sent. ``everything``: also batches that are not full."""
        self._take(wait_s)
        for actor in self._actors:
            if actor.call is None:
                self._send(actor, everything)

    def answers(self) -> dict[int, Scores]:
        """Rows of all questions by ticket, each once. Raises `RunError` where a teacher cannot answer."""
        while any(self._waiting.values()) or self._futures or any(a.call is not None for a in self._actors):
            self.work(everything=True, wait_s=POLL_S)
        rows, self._rows = self._rows, {}
        return rows

    def _send(self, actor: _Actor, everything: bool) -> None:
        def size(index: int) -> int:
            return sum(len(q.ids) for q in self._waiting[index])

        wanted = [i for i in actor.indices if size(i) >= (1 if everything else self._full_tokens)]
        if not wanted:
            return
        index = max(wanted, key=lambda i: (i == actor.last, size(i)))
        actor.questions, self._waiting[index] = self._waiting[index], []
        place = actor.indices.index(index)
        requests = [(place, q.ids, q.start) for q in actor.questions]
        if self._top_k is None:
            actor.call = actor.handle.score.remote(requests)
        else:
            actor.call = actor.handle.distributions.remote(requests, self._top_k)
        actor.since_s, actor.last = time.monotonic(), index

    def _take(self, wait_s: float) -> None:
        import ray

        calls = [a.call for a in self._actors if a.call is not None]
        done = set(ray.wait(calls, num_returns=1, timeout=wait_s)[0]) if calls else set()
        if not calls and wait_s and self._futures:
            time.sleep(min(wait_s, 0.01))
        for actor in self._actors:
            if actor.call is not None and actor.call in done:
                self._answered(actor)
            elif actor.call is not None and time.monotonic() - actor.since_s > self.config.timeout_s:
                self._again(actor, f"silent for {self.config.timeout_s:.0f} s")
        for ticket, (question, future) in list(self._futures.items()):
            if future.done():
                del self._futures[ticket]
                self._keep(question, future.result())

    def _answered(self, actor: _Actor) -> None:
        import ray

        try:
            rows = ray.get(actor.call)
        except ray.exceptions.RayTaskError as error:
            raise RunError(f"a teacher cannot score: {error.cause or error}") from error
        except ray.exceptions.RayActorError as error:
            self._again(actor, str(error).splitlines()[0])
            return
        for question, row in zip(actor.questions, rows, strict=True):
            self._keep(question, row)
        actor.call, actor.questions = None, []

    def _keep(self, question: _Question, row: Scores) -> None:
        asked = len(question.ids) - question.start
        if len(row.logprobs) != asked or (row.ids is not None and len(row.ids) != asked):
            raise RunError(f"a teacher gave {len(row.logprobs)} log-probs for {asked} tokens")
        self._rows[question.ticket] = row
        if self.config.cache_entries and row.ids is None:  # distributions are large
            self._cache[question.key] = row
            while len(self._cache) > self.config.cache_entries:
                self._cache.popitem(last=False)

    def _again(self, actor: _Actor, why: str) -> None:
        """A new actor, and the questions of the old one back in the queue."""
        import ray

        self.deaths += 1
        questions, actor.call, actor.questions = actor.questions, None, []
        for question in questions:
            question.attempts += 1
            if question.attempts >= ATTEMPTS:
                raise RunError(f"the teachers died or were silent {ATTEMPTS} times ({why})")
            self._waiting[question.index].append(question)
        ray.kill(actor.handle)
        self._start(actor)

    def _start(self, actor: _Actor) -> None:
        import ray

        models = [self._models[i] for i in actor.indices]
        arguments = (models, self._device, self._max_context, 1, self.config.storage)
        actor.handle, actor.last = ray.remote(Teachers).options(**self._options).remote(*arguments), -1

    # -- around it

    def statistics(self) -> dict[str, float]:
        """Since the start; of all actors together."""
        import ray

        calls = [a.handle.statistics.remote() for a in self._actors]
        found = ray.get(calls, timeout=self.config.timeout_s) if calls else []
        out: dict[str, float] = defaultdict(float)
        for one in found:
            for name, value in one.items():
                out[name] += value
        out["teacher/deaths"] = float(self.deaths)
        out["teacher/cache_hits"] = float(self.hits)
        out["teacher/asked"] = float(self.asked)
        if self._remote:
            out["teacher/retries"] = float(sum(scorer.retries for scorer in self._remote.values()))
        return dict(out)

    def close(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor.handle)
        for scorer in self._remote.values():
            scorer.close()
