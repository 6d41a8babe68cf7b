"""Chat formats: messages to token ids and back. Start at `load_renderer`."""

from k3rl.chat.loading import load_renderer
from k3rl.chat.renderer import Encoded, Renderer, ResponseStream
from k3rl.chat.xtml import XtmlRenderer
from k3rl.chat.xtml_parse import Delta

__all__ = ["Delta", "Encoded", "Renderer", "ResponseStream", "XtmlRenderer", "load_renderer"]
