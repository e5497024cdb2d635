"""Boxes that lie outside of what they are to be read from: refused with the parameter's own name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankcast import LocationError
from rankcast.transports.file import ExportedFile
from rankcast.transports.file_reads import box_in
from rankcast.transports.opening import open_any
from rankcast.transports.shm import create_segment


def test_a_box_outside_of_a_segment_names_its_parameter() -> None:
    with create_segment(64) as made, open_any(made.handle) as opened:
        with pytest.raises(LocationError, match=r"a box for layers\.0\.weight, .* do not belong together") as refusal:
            box_in(opened, "float32", (4, 4), (5, 1), 0, "layers.0.weight")
        assert refusal.value.tensor == "layers.0.weight"


def test_a_box_outside_of_a_file_names_its_parameter(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(64))
    with ExportedFile(path) as made, open_any(made.handle) as opened:
        with pytest.raises(LocationError, match=r"a box for layers\.0\.weight .* do not belong together") as refusal:
            box_in(opened, "float32", (4, 4), (5, 1), 0, "layers.0.weight")
        assert refusal.value.tensor == "layers.0.weight"
