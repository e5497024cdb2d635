"""What a server said about a failure, as one line for a message.

This module knows the forms in which engines put their errors. It must not know which call failed or what follows.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: The longest text that is taken over into a message, in characters.
SAID_LIMIT = 2000


def said(reply: bytes) -> str:
    """The text of an error reply: JSON in the forms of rankcast, vLLM and FastAPI, or plain text; trimmed."""
    try:
        text = _text(msgspec.json.decode(reply))
    except (msgspec.DecodeError, ValueError, RecursionError):
        text = reply[: 4 * SAID_LIMIT].decode(errors="replace")
    text = " ".join(text.split())
    if len(text) > SAID_LIMIT:
        text = text[:SAID_LIMIT] + f"... ({len(text):,} characters)"
    return text or "(nothing)"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in ("error", "detail"):
            if value.get(key):
                return _text(value[key])
        message = value.get("message")
        if isinstance(message, str) and message:
            lines = [line for line in map(_fault, _list(value.get("faults"))) if line not in message]
            return "; ".join([message, *lines])
    return msgspec.json.encode(value).decode()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _fault(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        worker = value.get("worker")
        return f"{worker}: {value['message']}" if isinstance(worker, str) else value["message"]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
