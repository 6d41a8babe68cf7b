"""What can go wrong with a sandbox, by what the caller can do about it.

``retryable`` says whether the same call may succeed later *and* may be repeated without doing its work twice.
Every message names the sandbox, so that a trajectory marked with it tells its reason alone.
"""

from __future__ import annotations


class SandboxError(Exception):
    """Base of all. ``code`` is the HTTP-like code where a server gave one, else 0."""

    retryable = False

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class InvalidRequest(SandboxError):
    """The request can never succeed: unknown template, bad argument, malformed id."""


class AuthenticationFailed(SandboxError):
    """The server does not accept the key."""


class SandboxNotFound(SandboxError):
    """No such sandbox: never made, killed, or expired."""


class FileMissing(SandboxError):
    """No such file or folder inside the sandbox."""


class SandboxPaused(SandboxError):
    """The call needs a running sandbox and this one is paused. Resume it first."""


class Conflict(SandboxError):
    """Another transition is under way. Back off and retry."""

    retryable = True


class Unavailable(SandboxError):
    """The server, its gateway or the way there is down for now (502, 503, 504, refused, reset)."""

    retryable = True


class SandboxTimeout(SandboxError):
    """No answer within the call's limit. The server may still finish it: poll before assuming that it
    failed."""


class BrokenStream(SandboxError):
    """A stream ended before its end event: the exit code is unknown. Never success."""


class ServerFault(SandboxError):
    """The server failed (500 and not one of its disguised codes)."""


class OutOfSpace(SandboxError):
    """The sandbox's disk or the snapshot limit is full."""


class Unsupported(SandboxError):
    """This backend cannot do this; see its `Capabilities`."""


class QuotaExceeded(SandboxError):
    """The run already holds as many sandboxes as it may."""


class IsolationUnavailable(SandboxError):
    """This machine cannot isolate untrusted code. Pass ``unsafe=True`` to run it regardless."""
