"""Where numbers go while a job runs: the run's own files, trackers of choice, the terminal."""

from k3rl.tracking.progress import Progress
from k3rl.tracking.tracker import Tracker

__all__ = ["Progress", "Tracker"]
