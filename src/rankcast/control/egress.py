"""Which way calls to an engine go: straight, or by a proxy of the environment; and whom TLS trusts on it.

This module knows the environment's variables for proxies and where they count. It must not know what is sent, nor how.
"""

from __future__ import annotations

import os
import ssl
from urllib.request import getproxies, proxy_bypass

import httpx

from rankcast.control.addresses import is_here
from rankcast.control.exchange import Exchange
from rankcast.control.kept_connections import KeptConnections
from rankcast.control.proxied import ProxiedCalls
from rankcast.errors import EngineError

_PORTS = {"http": 80, "https": 443}


#: Whether certificates are checked, or the file of those who may have signed them.
TlsVerify = bool | str | os.PathLike[str]


def exchange_with(url: httpx.URL, *, tls_verify: TlsVerify) -> Exchange:
    """The way to the engine at ``url``, which is http or https and carries no user name.

    Without ``tls_verify``, whoever answers is taken for the engine. Raises ``EngineError`` when it names no
    certificates, and when the environment names a proxy that cannot be used.
    """
    alone = is_here(url.host)
    # Building a trust store takes longer than a call on loopback, and plain http has no use for one. It is httpx's,
    # whichever way is gone: whether an engine is trusted must not hang on whether there is a proxy.
    trust = _trust(url, tls_verify) if url.scheme == "https" else None
    if trust is not None:
        trust.set_alpn_protocols(["http/1.1"])
    proxy = None if alone else proxy_for(url)
    if proxy is None:
        return KeptConnections(str(url), trust)
    try:
        return ProxiedCalls(url, proxy, trust)
    except ValueError as fault:
        raise EngineError(
            f"{url} would be asked by the proxy that the environment names, which cannot be used ({fault}): "
            "correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, or name the engine's host in NO_PROXY"
        ) from None


def _trust(url: httpx.URL, tls_verify: TlsVerify) -> ssl.SSLContext:
    if isinstance(tls_verify, bool):
        return httpx.create_ssl_context(verify=tls_verify)
    try:
        # An empty name would mean everybody whom this machine trusts.
        return ssl.create_default_context(cafile=os.fspath(tls_verify) or os.curdir)
    except OSError as fault:  # SSLError is one
        raise EngineError(
            f"{url} was to be trusted by the certificates in tls_verify={os.fspath(tls_verify)!r}, which cannot be "
            f"read ({fault}): give a file of certificates in PEM form"
        ) from None


def proxy_for(url: httpx.URL) -> str | None:
    """The proxy that the environment names for ``url``; ``None`` when it names none or excepts the host."""
    named = getproxies()
    proxy = named.get(url.scheme) or named.get("all")
    # An exception may be for a host or for one port of it, and only an IPv6 address without a port has no brackets.
    host, port = url.host, url.port or _PORTS[url.scheme]
    if not proxy or proxy_bypass(host) or proxy_bypass(f"{host}:{port}"):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
