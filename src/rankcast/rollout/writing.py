"""The writes of a session: the one place where old weights stop being whole.

This module knows the installer and the session machine. It must not know entries or segments. The machine is told
before the first write, and told again when a write fails half-way, so that nothing in between can be served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from rankcast.errors import InstallError
from rankcast.rollout.installer import Installer
from rankcast.rollout.program import CopyProgram
from rankcast.session import Session


class Writing:
    """What one worker's sessions write, through its installer; ``label`` names the worker in messages."""

    def __init__(self, installer: Installer, session: Session, label: str) -> None:
        self._installer = installer
        self._session = session
        self._label = label
        self._begun = False

    def weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Install ``weights``; none of them is no write. Raises ``InstallError`` when the engine's loader fails."""
        if weights:
            self._write(lambda: self._installer.install(weights), "loader")

    def program(self, program: CopyProgram) -> None:
        """Run a copy program; one without routes is no write. Raises ``InstallError`` when the engine fails."""
        if program.routes:
            self._write(lambda: self._installer.copy(program), "copy program")

    def _write(self, action: Callable[[], None], what: str) -> None:
        self._session.writing()
        try:
            if not self._begun:
                self._begun = True
                self._installer.begin()
            action()
        except Exception as fault:
            self._session.broken()
            raise InstallError(f"the {what} of {self._label} failed: {type(fault).__name__}: {fault}") from fault

    def finish(self) -> bool:
        """Post-process what was written; returns whether anything was. Raises ``InstallError`` when that fails."""
        if not self._begun:
            return False
        try:
            self._installer.finish()
        except Exception as fault:
            self._session.broken()
            # Nothing waits for more of it. Should this fail as well, the next start tries again, and says so.
            with contextlib.suppress(Exception):
                self._installer.abandon()
                self._begun = False
            raise InstallError(f"finishing on {self._label} failed: {type(fault).__name__}: {fault}") from fault
        self._begun = False
        return True

    def abandon(self) -> None:
        """Drop what was begun; raises ``InstallError`` when the engine fails at that. It is not tried again."""
        if not self._begun:
            return
        self._begun = False
        try:
            self._installer.abandon()
        except Exception as fault:
            raise InstallError(f"abandoning on {self._label} failed: {type(fault).__name__}: {fault}") from fault
