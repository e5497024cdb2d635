"""One codec for everything rankcast says: strict msgspec JSON inside an envelope that may carry a MAC.

This module knows how a body becomes ``{"body": "...", "mac": "..."}`` and back, and it decides what is refused before
any record is built. It must not know who talks to whom. The MAC (HMAC-SHA256, hex) covers the body's string, so that an
engine may re-encode what lies around it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import reprlib
from pathlib import Path
from typing import Any

import msgspec

from rankcast.errors import AuthenticationError, LimitError, PayloadError
from rankcast.wire.bodies import PROTOCOL

#: The longest body a worker parses, in bytes. A schedule of 100,000 tensors takes about 12 MB.
BODY_LIMIT = 64 * 2**20

#: The header in which a request without a signed body carries its MAC.
MAC_HEADER = "X-Rankcast-Mac"

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class _Protocol(msgspec.Struct, frozen=True):
    protocol: int


class Codec:
    """Encodes and decodes bodies; with a ``secret`` it signs what it writes and opens nothing unsigned."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return f"Codec(signed={self.signed})"

    @property
    def signed(self) -> bool:
        """Whether a secret is set."""
        return self._secret is not None

    def seal(self, body: msgspec.Struct) -> dict[str, str]:
        """The envelope of ``body``: plain strings, fit for any JSON around them."""
        text = msgspec.json.encode(body).decode()
        return {"body": text} if self._secret is None else {"body": text, "mac": self._mac(text)}

    def open(self, envelope: object, kinds: Any, *, what: str) -> Any:
        """The body of ``envelope``, which must be one of ``kinds`` (a struct type or a union of them).

        Raises ``AuthenticationError`` (a secret is set and the MAC is missing or wrong), ``LimitError`` (too large) and
        ``PayloadError`` (another form, protocol or kind); ``what`` names the message in their texts.
        """
        if not isinstance(envelope, dict) or not isinstance(envelope.get("body"), str):
            raise PayloadError(f'{what} must be {{"body": "<JSON>", "mac": "<hex>"}}, got {_shown(envelope)}')
        odd = sorted(str(key) for key in envelope.keys() - {"body", "mac"})
        if odd:
            raise PayloadError(f"{what} has unknown fields {_shown(odd)}")
        text: str = envelope["body"]
        if len(text) > BODY_LIMIT:
            raise LimitError(f"{what} is {len(text):,} characters long, the limit is {BODY_LIMIT:,}")
        if self._secret is not None:
            self._authenticate(text, envelope.get("mac"), what)
        return decode(text, kinds, what=what)

    def sign(self, route: str, body: bytes) -> str:
        """The MAC (hex) of a request to ``route`` (its query included) with ``body``; raises without a secret.

        A route begins with a slash and a message with a brace: neither MAC can stand for the other.
        """
        if self._secret is None:
            raise AuthenticationError(f"a request to {route} cannot be signed: there is no secret")
        return hmac.new(self._secret, route.encode(errors="surrogatepass") + b"\n" + body, hashlib.sha256).hexdigest()

    def check_signature(self, route: str, body: bytes, mac: str | None) -> None:
        """Raise ``AuthenticationError`` unless ``mac`` is that of the request; without a secret every one is fine."""
        if self._secret is None:
            return
        if mac is None:
            raise AuthenticationError(
                f"{route} came without {MAC_HEADER} and this engine has a secret: set the same RANKCAST_SECRET "
                "(or RANKCAST_SECRET_FILE) on both sides"
            )
        if not hmac.compare_digest(_bytes(mac), self.sign(route, body).encode()):
            raise AuthenticationError(f"{route} carries a wrong MAC: the two sides have different secrets")

    def _authenticate(self, text: str, mac: object, what: str) -> None:
        if not isinstance(mac, str):
            raise AuthenticationError(
                f"{what} carries no MAC but this side has a secret: set the same RANKCAST_SECRET "
                "(or RANKCAST_SECRET_FILE) on the trainer and on the engines"
            )
        if not hmac.compare_digest(_bytes(mac), self._mac(text).encode()):
            raise AuthenticationError(f"{what} carries a wrong MAC: the two sides have different secrets")

    def _mac(self, text: str) -> str:
        assert self._secret is not None
        return hmac.new(self._secret, _bytes(text), hashlib.sha256).hexdigest()


def decode(text: str | bytes, kinds: Any, *, what: str) -> Any:
    """Strictly decode one JSON record of ``kinds``; raises ``PayloadError`` naming ``what`` and the fault.

    The protocol number is looked at first, so that a newer message is refused for its number and not for its fields.
    """
    try:
        said = msgspec.json.decode(text, type=_Protocol).protocol
    except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
        raise PayloadError(f"{what} is not a rankcast record: {fault}") from None
    if said != PROTOCOL:
        raise PayloadError(
            f"{what} speaks protocol {said}, this side speaks {PROTOCOL}: use the same rankcast version on both sides"
        )
    decoder = _decoders.get(kinds)
    if decoder is None:
        decoder = _decoders[kinds] = msgspec.json.Decoder(kinds)
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as fault:
        raise PayloadError(f"{what} is malformed: {fault}") from None


def find_secret(given: str | bytes | None = None) -> bytes | None:
    """The secret to use: ``given``, else ``RANKCAST_SECRET``, else the contents of ``RANKCAST_SECRET_FILE``.

    Raises ``AuthenticationError`` when the file cannot be read or a secret is empty: an empty one protects nothing.
    """
    if isinstance(given, bytes):
        given = given.decode(errors="surrogateescape")
    text = given if given is not None else os.environ.get("RANKCAST_SECRET")
    path = os.environ.get("RANKCAST_SECRET_FILE")
    if text is None and path is not None:
        try:
            text = Path(path).read_text().strip()
        except (OSError, UnicodeError) as fault:
            raise AuthenticationError(f"RANKCAST_SECRET_FILE={path} cannot be read: {fault}") from None
    if text is None:
        return None
    if not text:
        raise AuthenticationError("the rankcast secret is empty: unset RANKCAST_SECRET, or give it a value")
    return text.encode(errors="surrogateescape")  # the environment's bytes, whatever they are


def _bytes(text: str) -> bytes:
    # Python's own JSON lets lone surrogates through: a MAC over them must be wrong, and not an exception of its own.
    return text.encode(errors="surrogatepass")


def _shown(value: object) -> str:
    text = reprlib.repr(value)  # bounded in depth and length before it is built
    return text if len(text) <= 80 else text[:77] + "..."
