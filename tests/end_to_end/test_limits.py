"""Five thousand parameters where a process may have 1,024 descriptors and no more."""

from __future__ import annotations

import pytest

from checkpoints import scaled_weights, tiny_config, write_checkpoint
from end_to_end.conftest import Start
from end_to_end.seen import differences
from fleets import started_server
from oracle import Layout

#: 5,000 parameters and more, of a few bytes each.
MANY = tiny_config(
    num_hidden_layers=26,
    num_experts=64,
    hidden_size=8,
    head_dim=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    moe_intermediate_size=2,
    vocab_size=64,
)
FEW_DESCRIPTORS = ("/bin/sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")


@pytest.mark.slow
def test_five_thousand_parameters_are_pushed_under_1024_descriptors(tmp_path, start: Start) -> None:
    layout = Layout(tp=2)
    assert len(scaled_weights(MANY, 0)) > 5000
    directory = write_checkpoint(tmp_path / "many", MANY, scaled_weights(MANY, 0))
    with started_server(directory, tp=2, within=FEW_DESCRIPTORS) as server:
        for pid in (server.pid, *server.workers):
            with open(f"/proc/{pid}/limits") as limits:
                assert next(line for line in limits if "open files" in line).split()[3:5] == ["1024", "1024"]
        ranks = start(1, MANY, within=FEW_DESCRIPTORS)
        for step, source in enumerate(("module", "shared"), start=1):
            assert ranks.one(0, "connect", [server.url], source, ["scaled", 0], {"bucket_bytes": 2**18}) == "shm"
            report = ranks.one(0, "push", source, ["scaled", step])
            assert report.get("error") is None, report
            assert differences(server.url, MANY, scaled_weights(MANY, step), layout) == []
            # What lies in a shared segment already is exported as it lies, in one handle for all of it.
            assert (report["staged_bytes"] == 0) is (source == "shared")
            assert ranks.one(0, "usage")["descriptors"] < 100
            ranks.one(0, "close")
