"""Rewards that misbehave where the response says so, and score 1 otherwise. One function per misbehaviour."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from rewards import Scored, reward


def asked(scored: Scored) -> bool:
    return "bad" in scored.content


@reward()
def loops_forever(scored: Scored) -> float:
    while asked(scored):
        pass
    return 1.0


@reward()
def loops_inside_c(scored: Scored) -> float:
    """A loop in which Python's signal handlers never run."""
    if asked(scored):
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
        ctypes.CDLL(None).pause()
    return 1.0


@reward()
def allocates(scored: Scored) -> float:
    if asked(scored):
        return float(len(bytearray(10 << 30)))
    return 1.0


@reward()
def raises(scored: Scored) -> float:
    if asked(scored):
        raise RuntimeError("the reward's own bug")
    return 1.0


@reward()
def is_nan(scored: Scored) -> float:
    return float("nan") if asked(scored) else 1.0


@reward()
def is_none(scored: Scored) -> float | None:
    return None if asked(scored) else 1.0


@reward()
def part_is_infinite(scored: Scored) -> dict[str, float]:
    return {"a": float("inf") if asked(scored) else 1.0}


@reward(scope="group")
def wrong_length(group: list[Scored]) -> list[float]:
    return [1.0] * (len(group) + any(map(asked, group)))


@reward()
def prints_a_gigabyte(scored: Scored) -> float:
    if asked(scored):
        line = "x" * (1 << 20)
        for _ in range(512):
            print(line)
        for _ in range(512):
            os.write(1, line.encode())
        raise ValueError("after a gigabyte")
    return 1.0


@reward()
def kills_itself(scored: Scored) -> float:
    if asked(scored):
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


@reward()
def exits(scored: Scored) -> float:
    if asked(scored):
        sys.exit(0)
    return 1.0


@reward()
def kills_its_parent(scored: Scored) -> float:
    if asked(scored):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(30)
    return 1.0


@reward()
def overflows_the_stack(scored: Scored) -> float:
    if asked(scored):
        ctypes.string_at(1)
    return 1.0


@reward()
def deadlocks(scored: Scored) -> float:
    if asked(scored):
        lock = threading.Lock()
        lock.acquire()
        waiter = threading.Thread(target=lock.acquire)
        waiter.start()
        waiter.join()
    return 1.0


@reward()
def leaves_a_thread(scored: Scored) -> float:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return 1.0


@reward()
def leaves_a_process(scored: Scored) -> float:
    """Its child leaves its session, so that killing the process group does not reach it."""
    if os.fork() == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", "86399"])
    return 1.0


MEMORY: list[str] = []


@reward()
def remembers(scored: Scored) -> float:
    MEMORY.append(scored.content)
    return float(len(MEMORY))


@reward(fresh=True)
def runs_what_the_model_wrote(scored: Scored) -> float:
    """As foolish as graders in the wild: an answer can patch it."""
    exec(scored.content, {"grader": sys.modules[__name__]})
    return verdict()


def verdict() -> float:
    return 0.0
