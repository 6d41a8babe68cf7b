"""A served viewer, and what its browser tests look for. Screenshots go to artifacts/viewer."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page

SHOTS = Path("artifacts/viewer")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def served(*paths: Path, arguments: tuple[str, ...] = ()):
    port = free_port()
    command = [sys.executable, "-m", "k3rl.cli", "view", *map(str, paths), "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = process.stdout.readline()
        assert "http://" in line, line + process.stdout.read()
        yield line.split("k3rl view: ")[1].split()[0]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def shot(page: Page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def rows_of(page: Page):
    return page.locator("tbody tr[data-rid]")
