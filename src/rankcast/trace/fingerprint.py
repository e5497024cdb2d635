"""What a trace was taken of, as far as an engine can say it at no cost: while this is the same, so is the trace.

This module knows four words and how they differ. It must not know how an engine finds them.
"""

from __future__ import annotations

import hashlib

import msgspec


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The class of the model, the engine with its version, how the model is divided, and which experts lie where.

    Each is text that is compared and shown to people; what is long goes in as a ``digest``. Empty where there is
    nothing to say.
    """

    model: str = ""
    engine: str = ""
    layout: str = ""
    experts: str = ""

    def changes(self, later: Fingerprint) -> list[str]:
        """One line for each of the four that is another in ``later``."""
        words = {
            "model": "the class of the model",
            "engine": "the engine",
            "layout": "the layout",
            "experts": "the placement of the experts",
        }
        return [
            f"{said} was {getattr(self, field) or 'not told'} and is {getattr(later, field) or 'not told'}"
            for field, said in words.items()
            if getattr(self, field) != getattr(later, field)
        ]


#: Of a loader that nobody says anything of.
NOTHING_SAID = Fingerprint()


def digest(value: object) -> str:
    """A short text that stands for plain data: lists, mappings in their order, numbers, bytes."""
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()


def class_name(instance: object) -> str:
    """The full name of an object's class."""
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
