"""The inside of a reward's process: read a task, call the reward, write a JSON line for each verdict."""

from __future__ import annotations

import io
import json
import pickle
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3rl.config.rewards import RewardSandbox
from k3rl.types import Outcome
from rewards.api import Scored
from rewards.calls import call_reward, failure
from rewards.isolation.frames import Closed, receive_frame, send_frame
from rewards.registry import get_reward, load_modules
from rewards.wire import verdict_to_json

KEPT_OUTPUT_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Task:
    """Some trajectories to be scored by one reward."""

    reward: str
    items: Sequence[Scored]
    arguments: Mapping[str, Any]
    timeout_s: float
    modules: tuple[str, ...] = ()
    sandbox: RewardSandbox = field(default_factory=RewardSandbox)


class Kept(io.TextIOBase):
    """Standard output of a reward: its first characters."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def write(self, text: str) -> int:
        if len(self.text) < KEPT_OUTPUT_CHARACTERS:
            self.text += text[: KEPT_OUTPUT_CHARACTERS - len(self.text)]
        return len(text)


def serve(sock: socket.socket) -> None:
    """Answer tasks until the caller goes."""
    while True:
        try:
            task = pickle.loads(receive_frame(sock))
        except Closed:
            return
        sys.stdout = sys.stderr = printed = Kept()
        try:
            load_modules(task.modules)
            reward = get_reward(task.reward)
            bound = reward.bind(task.arguments)
        except Exception as error:
            _reply(sock, {"ready": False, "verdict": verdict_to_json(failure(error, 0.0))})
            continue
        _reply(sock, {"ready": True})
        for verdicts in call_reward(reward, task.items, bound, task.timeout_s, task.sandbox):
            lines = [verdict_to_json(v) for v in verdicts]
            if printed.text and any(v.outcome is not Outcome.SCORED for v in verdicts):
                for line in lines:
                    line["explanation"] += f"\nprinted: {printed.text}"
            _reply(sock, {"verdicts": lines, "threads": _threads()})


def _threads() -> int:
    """Running threads, those of the sandbox client apart: they wait for the next call."""
    return sum(not t.name.startswith("sandbox") for t in threading.enumerate())


def _reply(sock: socket.socket, message: dict[str, Any]) -> None:
    send_frame(sock, json.dumps(message, allow_nan=False).encode())
