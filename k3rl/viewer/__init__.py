"""`k3rl view`: look at runs and their rollouts, in the browser or in the terminal."""

from k3rl.viewer.serve import serve
from k3rl.viewer.text import show_text

__all__ = ["serve", "show_text"]
