"""Start the web server and say where it is."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import uvicorn

from k3rl.errors import UserError
from k3rl.viewer.server import LOOPBACK, make_app
from k3rl.viewer.session import Session

TOKEN_VARIABLE = "K3RL_VIEW_TOKEN"


def serve(
    paths: list[Path],
    port: int = 8800,
    host: str = "127.0.0.1",
    rewards: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
) -> None:
    """Blocks until interrupted. ``port`` 0: any free one. Anything but loopback needs a token: that of
    ``K3RL_VIEW_TOKEN``, or a new one. ``rewards`` and ``modules``: see `Session`. Raises `UserError`."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if host not in LOOPBACK and not token:
        token = secrets.token_urlsafe(24)
    with Session(paths, rewards=rewards, modules=modules) as session, _listening(host, port) as listening:
        chosen = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        query = f"/?token={token}" if token else ""
        print(f"k3rl view: http://{shown}:{chosen}{query}   (Ctrl-C ends it)", flush=True)
        config = uvicorn.Config(
            make_app(session, host, token), log_level="warning", access_log=False, timeout_graceful_shutdown=2
        )
        uvicorn.Server(config).run([listening])


def _listening(host: str, port: int) -> socket.socket:
    """Listens before the address is printed: who reads it may come at once."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return listening
