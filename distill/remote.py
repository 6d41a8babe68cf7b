"""A teacher behind HTTP: a server with vLLM's OpenAI-compatible ``/completions``, which takes token ids as its prompt
and gives each one's log-prob (``prompt_logprobs``).

What could shift or mix up silently is checked in every answer: there are as many entries as ids, each entry names its
id, and the server's text of each id is the student's. Connections that fail, time limits, and answers 408, 429 and 5xx
are tried again with growing pauses; other answers mean a wrong request and stop the run with the server's words.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from distill.teachers import Scores
from k3rl.chat import Renderer
from k3rl.config.distill import RemoteTeacher
from k3rl.errors import RunError, UserError, nearest

log = logging.getLogger(__name__)
AGAIN = {408, 429, 500, 502, 503, 504}
LARGEST_PAUSE_S = 30.0
HANDSHAKE_IDS = 512
"""Ids in one request of the handshake."""


class RemoteScorer:
    """Asks one server. ``name`` is the teacher's in messages. Thread-safe; `close` gives up what is under way."""

    def __init__(self, config: RemoteTeacher, name: str, renderer: Renderer) -> None:
        self.config, self.name, self._renderer = config, name, renderer
        self._texts: dict[int, str] = {}
        self._pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix=f"teacher-{name}")
        self._closed = threading.Event()
        self.retries = 0
        self.model = config.model

    def handshake(self) -> None:
        """Find the model, and compare the server's text of every token id with the student's. Raises `UserError` before
        anything expensive starts: no server, no such model, another vocabulary."""
        try:
            served = [m["id"] for m in self._call("/models", None)["data"]]
            if self.model and self.model not in served:
                raise UserError(
                    f"teacher '{self.name}': no model '{self.model}' at {self.config.url}{nearest(self.model, served)}"
                )
            self.model = self.model or served[0]
            first = 1  # nothing is known of what comes first
            for start in range(0, self._renderer.vocab_size, HANDSHAKE_IDS):
                ids = list(range(start, min(start + HANDSHAKE_IDS, self._renderer.vocab_size)))
                self._score([0, *ids], first)
        except RunError as error:
            raise UserError(str(error)) from error

    def submit(self, ids: Sequence[int], start: int, top_k: int = 0) -> Future[Scores]:
        """Natural log-probs of ``ids[start:]``, and of the ``top_k`` likeliest ids. The future raises `RunError`."""
        return self._pool.submit(self._score, list(ids), start, top_k)

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _score(self, ids: list[int], start: int, top_k: int = 0) -> Scores:
        asked = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top_k,
        }
        answer = self._call("/completions", asked)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            entries = None
        if not isinstance(entries, list):
            raise RunError(
                f"teacher '{self.name}': the answer of {self.config.url} has no prompt_logprobs; it must be a server "
                "that gives them, such as vLLM's"
            )
        if len(entries) != len(ids):
            raise RunError(
                f"teacher '{self.name}': {self.config.url} gave {len(entries)} log-probs for {len(ids)} tokens"
            )
        own = [self._entry(entry, ids[i], i) for i, entry in enumerate(entries[start:], start)]
        return Scores(own, *self._top(entries[start:], top_k)) if top_k else Scores(own)

    def _top(self, entries: list[Any], k: int) -> tuple[Any, Any]:
        """The ``k`` likeliest of each entry, which may hold the sampled id besides."""
        ids = np.zeros((len(entries), k), np.int32)
        logprobs = np.zeros((len(entries), k), np.float32)
        for row, entry in enumerate(entries):
            best = sorted(((float(v["logprob"]), int(t)) for t, v in entry.items()), reverse=True)[:k]
            if len(best) < k:
                raise RunError(
                    f"teacher '{self.name}': {self.config.url} gave {len(best)} of the {k} likeliest tokens; vLLM "
                    "needs --max-logprobs for that many"
                )
            logprobs[row], ids[row] = [p for p, _ in best], [t for _, t in best]
        return ids, logprobs

    def _entry(self, entry: Any, token: int, position: int) -> float:
        own = entry.get(str(token)) if isinstance(entry, dict) else None
        if not isinstance(own, dict) or not isinstance(own.get("logprob"), int | float):
            raise RunError(
                f"teacher '{self.name}': {self.config.url} says nothing about token {token} at position {position}"
            )
        theirs = own.get("decoded_token")
        if theirs is not None and not self._alike(theirs, token):
            raise RunError(
                f"teacher '{self.name}': token {token} is {theirs!r} at {self.config.url} and "
                f"{self._text(token)!r} for the student: they have different vocabularies"
            )
        return float(own["logprob"])

    def _alike(self, theirs: str, token: int) -> bool:
        """Pieces of characters have no text of their own, and servers show spaces in several ways."""
        ours = self._text(token)
        return "\ufffd" in theirs + ours or _plain(theirs) == _plain(ours)

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._renderer.decode([token])
        return self._texts[token]

    # -- HTTP

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        pause, said = self.config.backoff_s, ""
        for attempt in range(1, self.config.attempts + 1):
            try:
                return self._once(path, body)
            except urllib.error.HTTPError as error:
                said = f"{error.code}: {_reason(error)}"
                if error.code not in AGAIN:
                    raise RunError(
                        f"teacher '{self.name}': {self.config.url}{path} answered {said}"
                    ) from None
            except (OSError, ValueError) as error:  # no connection, time limit, cut off, not JSON
                said = f"{type(error).__name__}: {error}"
            if attempt < self.config.attempts:
                self.retries += 1
                log.warning("teacher '%s': %s (try %d of %d)", self.name, said, attempt, self.config.attempts)
                if self._closed.wait(pause):
                    break
                pause = min(2 * pause, LARGEST_PAUSE_S)
        raise RunError(
            f"teacher '{self.name}': {self.config.url} did not answer in {self.config.attempts} tries ({said}); start "
            "it again and run the same command to go on"
        )

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.config.api_key_env:
            headers["Authorization"] = f"Bearer {os.environ.get(self.config.api_key_env, '')}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.config.url.rstrip("/") + path, data, headers)
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=self.config.timeout_s) as answer:
            content = answer.read()
        log.debug("teacher '%s': %s in %.2f s", self.name, path, time.monotonic() - began)
        return json.loads(content)


def _plain(text: str) -> str:
    return text.replace("\u0120", " ").replace("\u2581", " ").replace("\u010a", "\n").strip(" ")


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        content = json.loads(error.read())
        return str(content.get("message") or content.get("error", {}).get("message") or content)[:300]
    except (OSError, ValueError, AttributeError):
        return error.reason if isinstance(error.reason, str) else "no reason given"
