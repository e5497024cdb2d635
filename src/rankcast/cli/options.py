"""How options that several commands share are written: sizes and HTTP headers.

This module knows spellings. It must not know what a size or a header is used for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated

import typer

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str, option: str | None = None) -> int:
    """Bytes from ``512MiB``, ``512M``, ``1g``, ``64k`` (powers of 1024), ``1GB`` (powers of 1000), or a plain number.

    A fraction is allowed (``1.5GiB``) and rounded down. Raises ``typer.BadParameter`` for any other spelling and for
    less than one byte; ``option`` names the option in it.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3].lower() in ("i", "ib") and not match[2]):
        raise typer.BadParameter(f"{text!r} is no size: write 512MiB, 1g, 64k, or a number of bytes", param_hint=option)
    base = 1000 if match[2] and match[3].lower() == "b" else 1024
    size = int(Decimal(match[1]) * base ** _POWERS[match[2].lower()])
    if size < 1:
        raise typer.BadParameter(f"{text!r} is less than one byte", param_hint=option)
    return size


def parse_headers(texts: Sequence[str] | None) -> dict[str, str]:
    """Headers from ``NAME: VALUE`` texts; raises ``typer.BadParameter`` for another form and for a name given twice."""
    headers: dict[str, str] = {}
    for text in texts or ():
        name, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search(r"[^\t -~]", value):
            # The text itself may be a credential: it is not shown.
            raise typer.BadParameter("a header is written 'NAME: VALUE', in plain ASCII", param_hint="--header")
        if name.lower() in {known.lower() for known in headers}:
            raise typer.BadParameter(f"header {name} is given twice", param_hint="--header")
        headers[name] = value
    return headers


Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="The engines of the fleet: http://HOST:PORT.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Headers = Annotated[
    list[str] | None, typer.Option("--header", metavar="'NAME: VALUE'", help="Sent with every request; repeatable.")
]
Listen = Annotated[
    str | None,
    typer.Option(metavar="ADDR", help="Address on which workers' reports are taken: HOST or HOST:PORT."),
]
TlsVerify = Annotated[bool, typer.Option(help="Check the engines' certificates.")]
