"""Every error a caller can meet, in one tree.

This module knows the names of failures and what each carries; it must not know how any of them comes about. ``code`` is
the stable name that travels in reports and JSON, ``status`` the HTTP status an engine's server answers with.
"""

from __future__ import annotations

from typing import ClassVar


class RankcastError(Exception):
    """Anything rankcast refuses or fails at; catch this to catch them all.

    ``tensor`` is a checkpoint (or parameter) name and ``worker`` a worker's label, where the error is about one.
    """

    code: ClassVar[str] = "rankcast"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, tensor: str | None = None, worker: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.tensor = tensor
        self.worker = worker


class PayloadError(RankcastError):
    """A payload, entry or init message has the wrong form, length, kind or protocol, or is not for this worker."""

    code = "payload"
    status = 400


class AuthenticationError(RankcastError):
    """A secret is set and the MAC is missing or wrong, or an unsigned request asks for what only a signed one may."""

    code = "authentication"
    status = 401


class StateError(RankcastError):
    """A call came in a state in which it is not allowed: update before start, start twice, a gap in the sequence."""

    code = "state"
    status = 409


class LeaseError(RankcastError):
    """Another trainer holds the fleet; the message says who and until when."""

    code = "lease"
    status = 409


class ManifestError(RankcastError):
    """Tensors are missing, unknown, given twice, or differ in shape or dtype from what a worker has."""

    code = "manifest"
    status = 400


class LocationError(RankcastError):
    """A location lies outside its segment, or a handle does not open the memory that it describes."""

    code = "location"
    status = 400


class LimitError(RankcastError):
    """A limit of this machine or of rankcast is in the way; the message names the limit, both values and the cure."""

    code = "limit"
    status = 400


class UnsupportedError(RankcastError):
    """Something rankcast cannot keep correct, refused by name when it is asked for."""

    code = "unsupported"
    status = 400


class NotServableError(RankcastError):
    """A worker was asked to generate while its weights are incomplete or after a failed update."""

    code = "not_servable"
    status = 503


class InstallError(RankcastError):
    """The engine's own loader or post-processing failed while new weights were being written."""

    code = "install"
    status = 422


class DigestError(RankcastError):
    """A worker took other bytes than the trainer had when the push began: something wrote them on the way. Or trainer
    ranks that hold the same tensor, or the same box of one, hold different bytes."""

    code = "digest"
    status = 422
    #: Whether every trainer rank raises this one by itself, so that none needs to be told of it.
    heard: bool = False


class EngineError(RankcastError):
    """An engine did not answer, answered with an error, or lost a worker."""

    code = "engine"
    status = 502


class TrainerError(RankcastError):
    """Another trainer rank raised, died, or did not arrive in time."""

    code = "trainer"
    status = 500


class SourceError(RankcastError):
    """A weight source did not deliver what its manifest promised."""

    code = "source"
    status = 500


class PushError(RankcastError):
    """A push did not publish; the message says what the fleet now serves.

    ``faults`` has one line per worker and cause, ``codes`` the error codes among them.
    """

    code = "push"
    status = 500

    def __init__(
        self,
        message: str,
        *,
        faults: tuple[str, ...] = (),
        codes: tuple[str, ...] = (),
        tensor: str | None = None,
        worker: str | None = None,
    ) -> None:
        super().__init__(message, tensor=tensor, worker=worker)
        self.faults = faults
        self.codes = codes


def travelling(text: str) -> str:
    """``text`` with escapes for what has no UTF-8 form (a lone surrogate, as in some names and paths).

    An error must not fail to be told for the words that it is told in.
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def error_for(code: str) -> type[RankcastError]:
    """The class whose errors travel as ``code``; a code that this version does not know gives the base class."""
    return _BY_CODE.get(code, RankcastError)


_BY_CODE: dict[str, type[RankcastError]] = {
    kind.code: kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, RankcastError)
}
