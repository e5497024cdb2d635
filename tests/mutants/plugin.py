"""A pytest plugin that puts the mutant named by ``RANKCAST_MUTANT`` into the test process: ``-p mutants.plugin``.

It knows the variable; what a mutant does is the registry's. Without the variable it does nothing.
"""

from __future__ import annotations

import os

import pytest

from mutants.registry import apply

VARIABLE = "RANKCAST_MUTANT"


def pytest_configure(config: pytest.Config) -> None:
    name = os.environ.get(VARIABLE)
    if name:
        apply(name)
