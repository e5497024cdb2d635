"""Every inside of vLLM that rankcast touches, and nothing else; tested with the releases of ``TESTED``.

This package knows vLLM's names. It must not know rankcast's protocol. vLLM is imported inside functions, and no name of
it has a substitute: a changed inside is an error at use, with its name, and not at import.
"""

from __future__ import annotations

#: Releases, as major.minor, whose insides this file was tested against.
TESTED = ("0.32",)


def unsupported_version() -> str | None:
    """Why this vLLM cannot be used, or ``None``."""
    import vllm

    found = str(vllm.__version__)
    if ".".join(found.split(".")[:2]) in TESTED:
        return None
    return f"rankcast needs vLLM {' or '.join(TESTED)}, found {found}: install one of these, or use backend 'ipc'"
