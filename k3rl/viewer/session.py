"""What lives as long as the viewer: the index, the thread that keeps it fresh, a folder of its own."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from k3rl.errors import UserError
from k3rl.viewer.index import Index
from k3rl.viewer.queries import Queries
from k3rl.viewer.sources import Sources

log = logging.getLogger(__name__)


class Session:
    """Open as a context. The folder with the database is removed at the end.

    ``rewards`` and ``modules``: what people may score again with besides the built-in rewards.
    """

    def __init__(
        self,
        paths: list[Path],
        poll_s: float = 1.0,
        rewards: tuple[str, ...] = (),
        modules: tuple[str, ...] = (),
    ) -> None:
        self.rewards, self.modules = rewards, modules
        self.folder = Path(tempfile.mkdtemp(prefix="k3rl-view-"))
        try:
            self.sources = Sources(paths, self.folder / "copies")
            self.index = Index(self.sources, self.folder)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.queries = Queries(self.index)
        self.trouble = ""
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name="k3rl-view-index", daemon=True)

    def __enter__(self) -> Session:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        self.index.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def read_all(self) -> None:
        """Read everything that is there, in this thread; for callers that never enter the session."""
        self.index.refresh()
        while self.sources.busy:
            self.index.refresh()
        while self.index.derive():
            pass

    def _keep_fresh(self) -> None:
        """New files first; derived columns in the time between. What fails is said on every page, and tried again."""
        while not self._stop.is_set():
            try:
                self.index.refresh()
                busy = self.index.derive() or self.sources.busy
                self.trouble = ""
            except (UserError, OSError) as error:
                self.trouble, busy = str(error), False
            except (
                Exception
            ) as error:  # the border of the thread: without it the viewer would stand still in silence
                log.exception("reading runs")
                self.trouble, busy = f"reading the runs failed: {type(error).__name__}: {error}", False
            self._stop.wait(0.02 if busy else self._poll_s)
