"""The exceptions of the proxy.

There are two separate trees: a `CacheFault` costs a request its speed and is never seen by a client; a
`ProxyError` is an answer to the client and carries the HTTP status of that answer. A fault has a class of
its own only if some code catches that class.
"""

import os
import socket
from ssl import SSLError


def in_words(error: BaseException) -> str:
    """Return why something failed, without error numbers and the names of exceptions."""
    if isinstance(error, SSLError) and (reason := getattr(error, "reason", None)):
        if flaw := getattr(error, "verify_message", ""):
            return f"{flaw}; start this command with SSL_CERT_FILE=FILE to trust another one"
        return f"no TLS, {reason.lower().replace('_', ' ')}"
    if not isinstance(error, OSError) or not (error.errno or error.strerror):
        return str(error) or "it broke off"
    is_known = error.errno and error.errno > 0 and not isinstance(error, socket.gaierror | SSLError)
    why = os.strerror(error.errno or 0) if is_known else error.strerror or "it broke off"
    place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    if place and isinstance(error, PermissionError):
        why += f" for this user (uid {os.geteuid()})"
    return place + why[:1].lower() + why[1:]


class SettingsError(Exception):
    """A setting is unknown or has an impossible value; the message says where, and what is allowed."""


class UnknownShape(Exception):
    """A part of a body that the proxy cannot read; the message says which, and quotes no text of it."""


class CacheFault(Exception):
    """Something in the cache did not work; the request is served without it."""


class StateFileMalformed(CacheFault):
    """A state file does not have llama-server's format."""


class StoreFault(CacheFault):
    """The store could not read or write."""


class IndexDamaged(StoreFault):
    """The index cannot be used, but it can be rebuilt; `flaw` says what is wrong."""

    def __init__(self, index: object, flaw: str) -> None:
        super().__init__(f"the index {index} cannot be used ({flaw}): `check --fix` makes it anew")
        self.flaw = flaw


class SharedStoreFault(CacheFault):
    """The shared store failed."""


class StateDamaged(StoreFault):
    """A state file is no regular file, or its bytes differ from what was saved."""


class StoreLocked(StoreFault):
    """Another proxy uses the directory."""


WRITE_BUDGET = "write budget"


class NoRoom(CacheFault):
    """A state is not saved because there is no room for it; `reason` is one of a few words."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UpstreamFault(CacheFault):
    """A call that the proxy made on its own behalf failed."""


class UpstreamUnreachable(UpstreamFault):
    """llama-server did not answer at all."""


class UpstreamSlow(UpstreamUnreachable):
    """llama-server is there but did not answer in time."""


class UpstreamLost(UpstreamUnreachable):
    """llama-server went away while it worked on the call; the call may have ended it."""


class UpstreamRefused(UpstreamFault):
    """llama-server answered with an error; `status` is llama-server's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"llama-server answered {status}" + f": {message}" * bool(message))
        self.status = status


class WillBeRefused(CacheFault):
    """llama-server will refuse a request before it reaches a slot; the message says why."""


class ProxyError(Exception):
    """The request cannot be served; `status` is that of the answer to the client."""

    status = 500

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status or self.status


class NotKnown(ProxyError):
    """What an operator asks for by its id is not known here; the message says why."""

    status = 404


class ServerAway(ProxyError):
    """llama-server is not there, or went away before it answered a request.

    `was_sent` says whether llama-server got anything of the request, `has_ended` whether llama-server ended
    by itself while it worked for the request. `status` is 503 if the request waited in vain.
    """

    status = 502

    def __init__(
        self, why: str, status: int | None = None, *, was_sent: bool = True, has_ended: bool = False
    ) -> None:
        super().__init__(why, status)
        self.was_sent = was_sent
        self.has_ended = has_ended


def replaced() -> ServerAway:
    """Return the error of a request whose llama-server was replaced before the request was sent."""
    return ServerAway("llama-server was replaced meanwhile", was_sent=False)


class OutOfCells(ProxyError):
    """llama-server failed a request, and all others that ran, because its slots share too few cells."""


class ProxyStopped(ProxyError):
    """The proxy stops before the request is answered."""

    status = 503


class TooManyRequests(ProxyError):
    """The queue for a slot is full."""

    status = 503
