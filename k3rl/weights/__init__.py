"""One versioned publication of weights, several transports, and proof of arrival. See
`k3rl.weights.delivery`.
"""

from k3rl.weights.delivery import (
    Publisher,
    canary_sequences,
    deliver,
    make_transport,
    receive,
    verify,
)
from k3rl.weights.handshake import Handshake
from k3rl.weights.publication import Ack, Canary, Publication, TensorInfo, checksum

__all__ = [
    "Ack",
    "Canary",
    "Handshake",
    "Publication",
    "Publisher",
    "TensorInfo",
    "canary_sequences",
    "checksum",
    "deliver",
    "make_transport",
    "receive",
    "verify",
]
