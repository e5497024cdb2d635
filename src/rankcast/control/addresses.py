"""Hosts, ports and URLs: which are loopback, how an address to listen on is written, which one faces a peer.

This module knows how addresses are spelt and asks the kernel for routes. It must not open a connection, and it must not
know who listens or calls.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

import httpx

from rankcast.errors import EngineError, LimitError, UnsupportedError

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address, an IPv6 one with or without brackets) can only be this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_here(host: str) -> bool:
    """Whether whoever calls ``host`` reaches this machine and no other: loopback, or the address that servers print
    when they listen on every one."""
    return is_loopback(host) or is_wildcard(host.strip("[]"))


def engine_url(text: str) -> httpx.URL:
    """The URL of an engine, without a trailing slash; raises ``EngineError`` unless it is http or https with a host."""
    try:
        url = httpx.URL(text.strip().rstrip("/"))
    except (httpx.InvalidURL, ValueError) as fault:
        raise EngineError(f"{_without_user(text)!r} is no engine's URL ({fault}): give http://HOST:PORT") from None
    aimed = url.host and (url.port or 0) <= 65535
    if url.scheme not in ("http", "https") or not aimed or url.query or url.fragment:
        raise EngineError(f"{_without_user(text)!r} is no engine's URL: give http://HOST:PORT")
    return url


def _without_user(text: str) -> str:
    """What somebody gave for a URL, without what may be a password in it."""
    return re.sub(r"^[^/]*//\S*@|^\S*@", "...@", text.strip())


def shown_url(url: httpx.URL) -> str:
    """``url`` as messages name it: without the user name and password that it may carry."""
    return str(url.copy_with(username=None, password=None)) if url.userinfo else str(url)


def split_listen(listen: str | None) -> tuple[str, int]:
    """Host and port of an address to listen on: ``"host"``, ``"host:port"``, ``"[v6]:port"``, ``None`` for loopback.

    Port 0, the default, means any free one. Raises ``UnsupportedError`` for a port that is none, and for a wildcard:
    others must be told one address at which they can reach the listener.
    """
    if listen is None:
        return LOOPBACK, 0
    text = listen.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        port = rest.removeprefix(":") if bracket and rest.startswith(":") else ("0" if bracket and not rest else "")
    elif text.count(":") > 1:
        host, port = text, "0"
    else:
        host, colon, rest = text.partition(":")
        port = rest if colon else "0"
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UnsupportedError(f"listen={listen!r} is no address: give HOST or HOST:PORT")
    if is_wildcard(host):
        raise UnsupportedError(
            f"listen={listen!r} names no one address: give the address of this host at which the engines reach it"
        )
    return host, int(port)


def is_wildcard(host: str) -> bool:
    """Whether listening on ``host`` means every address of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def listening_socket(host: str, port: int, *, backlog: int) -> socket.socket:
    """A listening TCP socket on exactly ``host``; ``port`` 0 takes any free one.

    Raises ``LimitError`` when the address is not this machine's, not free, or not resolvable.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as fault:
        raise LimitError(f"cannot listen on {host}: {fault}; give an address of this machine") from None
    try:
        # A restarted trainer must get its fixed port back while old connections are still in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as fault:
        listener.close()
        raise LimitError(
            f"cannot listen on {host}:{port}: {fault}; give an address of this machine and a free port (0: any)"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """``http://address:port`` of a listening socket, numeric, so that nobody needs a name server to reach it."""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if listener.family is socket.AF_INET6 else f"http://{address}:{port}"


def facing(urls: Sequence[str]) -> str | None:
    """The address of this host from which the engines at ``urls`` are reached; ``None`` when all are on loopback.

    Nothing is sent. Raises ``UnsupportedError`` when no route leads to an engine, or when engines are reached from
    different addresses: then the caller must say on which to listen.
    """
    found: dict[str, str] = {}
    for text in urls:
        url = engine_url(text)
        if not is_here(url.host):
            found.setdefault(_source_address(url), shown_url(url))
    if len(found) > 1:
        ways = ", ".join(f"{address} for {url}" for address, url in found.items())
        raise UnsupportedError(f"the engines are reached from different addresses of this host ({ways}): pass listen=")
    return next(iter(found), None)


def _source_address(url: httpx.URL) -> str:
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(url.host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket only looks the route up
            return str(probe.getsockname()[0])
    except OSError as fault:
        raise UnsupportedError(f"no route leads from this host to {shown_url(url)}: {fault}") from None
