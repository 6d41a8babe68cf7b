"""Problems and conversations: where they come from, in which order they are drawn."""

from k3rl.data.config import DataConfig
from k3rl.data.conversations import Conversation, ConversationStream, load_conversations
from k3rl.data.problems import ProblemSource, every_effort, load_problems
from k3rl.data.stream import ProblemStream

__all__ = [
    "Conversation",
    "ConversationStream",
    "DataConfig",
    "ProblemSource",
    "ProblemStream",
    "every_effort",
    "load_conversations",
    "load_problems",
]
