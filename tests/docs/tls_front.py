"""TLS before a server that does not speak it: what a gateway does, for the pages' examples.

It knows sockets and the tests' certificate; it must not know HTTP, nor what is said through it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator

import httpx

from control.raw_server import encrypting


@contextlib.contextmanager
def tls_before(url: str) -> Iterator[str]:
    """The https URL at which the server at ``url`` is reached for as long as the context lasts."""
    behind = httpx.URL(url)
    assert behind.port is not None
    address = (behind.host, behind.port)
    trust = encrypting()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=_accept, args=(listener, trust, address), daemon=True)
        accepting.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)  # which wakes whoever waits for a client
        accepting.join()


def _accept(listener: socket.socket, trust: ssl.SSLContext, address: tuple[str, int]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_join, args=(client, trust, address), daemon=True).start()


def _join(client: socket.socket, trust: ssl.SSLContext, address: tuple[str, int]) -> None:
    """Pass on what comes from either side, until one of them ends; by one thread, as such a socket wants it."""
    with contextlib.suppress(OSError), client:
        with trust.wrap_socket(client, server_side=True) as outside, socket.create_connection(address) as inside:
            sinks: dict[socket.socket, socket.socket] = {outside: inside, inside: outside}
            while True:
                # What was decrypted already is nothing that the kernel knows of.
                ready = [outside] if outside.pending() else select.select(list(sinks), [], [])[0]
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return
                    sinks[source].sendall(data)
