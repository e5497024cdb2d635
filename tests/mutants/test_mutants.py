"""With a fault put into the library, tests fail; without one, the same tests pass.

It knows which small part of the suite is run for that. What each mutant breaks is the registry's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleets import environment
from mutants.plugin import VARIABLE
from mutants.registry import MUTANTS

ROOT = Path(__file__).resolve().parent.parent.parent

RUN = Path(__file__).resolve().parent / "run.py"

#: Quick ones first: a run stops at the first failure.
CHOSEN = (
    "tests/test_session.py::test_a_skipped_number_is_refused_naming_both",
    "tests/test_session.py::test_no_install_before_prepare",
    "tests/test_session.py::test_the_holder_is_named_with_the_time_left",
    "tests/rollout/test_selection.py::test_a_list_gives_worker_i_entry_i[dp2pp1tp2]",
    "tests/rollout/test_bare.py::test_a_partial_update_is_never_served",
    "tests/trainer/test_push_segments.py::test_each_round_holds_what_was_staged_for_it_and_no_other",
    (
        "tests/trainer/test_push_segments.py"
        "::test_there_are_two_buckets_of_what_was_asked_for_and_one_for_tensors_that_are_larger"
    ),
    "tests/trainer/test_push_sessions.py::test_no_install_goes_out_before_every_worker_of_every_engine_is_prepared",
    "tests/trainer/test_push_sessions.py::test_no_version_is_set_and_nothing_resumes_before_every_worker_attested",
    "tests/trainer/test_push_sessions.py::test_a_mixed_fleet_is_not_resumed_when_one_engine_broke_in_the_middle",
    "tests/rollout/test_refusals.py::test_a_list_in_another_order_is_refused",
    "tests/rollout/test_refusals.py::test_an_entry_that_is_not_signed_with_the_secret_is_refused[wrong_mac-prepare]",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest said of the chosen tests, by mutant."""
    folder = tmp_path_factory.mktemp("mutants")
    child = environment()
    child.pop(VARIABLE, None)
    done = subprocess.run(
        [sys.executable, str(RUN), str(folder), *CHOSEN],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env=child,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.name: path.read_text() for path in folder.iterdir()}


def status(text: str) -> int:
    return int(text.split()[-1])


def test_without_a_mutant_the_chosen_tests_pass(said: dict[str, str]) -> None:
    text = said["none"]
    assert status(text) == 0, text[-3000:]
    found = re.search(r"(\d+) passed", text)
    assert found is not None, text[-3000:]
    assert int(found[1]) >= len(CHOSEN)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_makes_tests_fail(mutant: str, said: dict[str, str]) -> None:
    text = said[mutant]
    # 1 is "some tests failed"; an error in collection, in a fixture or in the plugin is something else.
    assert status(text) == 1, text[-3000:]
    assert re.search(r"\b1 failed\b", text), text[-3000:]
    assert not re.search(r"\b\d+ errors?\b", text), text[-3000:]
