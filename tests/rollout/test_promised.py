"""A loader that remembers, and so does less when it runs than when it was traced, is found by name."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import rankcast
from rankcast import PushError, Receiver

STAGED = ["ranklocal", "broadcast"]


class Remembering(nn.Module):
    """Two weights; what the loader passes over is up to its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(40, 30))
        self.w = nn.Parameter(torch.zeros(64, 48))
        self.done: set[str] = set()

    def passes_over(self, name: str, tensor: Tensor) -> bool:
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if not self.passes_over(name, tensor):
                self.done.add(name)
                self.get_parameter(name).data.copy_(tensor)


class EveryNameOnce(Remembering):
    def passes_over(self, name: str, tensor: Tensor) -> bool:
        return name in self.done


class EveryRealNameOnce(Remembering):
    """Does not count the tensors of a trace, which have no elements."""

    def passes_over(self, name: str, tensor: Tensor) -> bool:
        passed = (name, "real") in self.real
        if not tensor.is_meta:
            self.real.add((name, "real"))
        return passed

    def __init__(self) -> None:
        super().__init__()
        self.real: set[tuple[str, str]] = set()


class OneOfThemOnce(EveryRealNameOnce):
    def passes_over(self, name: str, tensor: Tensor) -> bool:
        return super().passes_over(name, tensor) and name == "v"


def trained(step: int) -> nn.Module:
    module = nn.Module()
    for name, shape in (("v", (40, 30)), ("w", (64, 48))):
        module.register_parameter(name, nn.Parameter(torch.full(shape, step + 0.5)))
    return module


@pytest.mark.parametrize("mode", STAGED)
def test_one_that_loads_every_name_once_is_refused_before_anything_is_written(mode: str) -> None:
    served = EveryNameOnce()
    receiver = Receiver(served)
    with rankcast.connect(receiver, trained(1), mode=mode, timeout=20) as sync:
        with pytest.raises(PushError, match=r"the loader does not do with v in round 0 .* all tensors come at once"):
            sync.push("1")
        assert receiver.servable
        assert receiver.weight_version == ""
        assert not served.v.any()
        assert not served.w.any()


@pytest.mark.parametrize("check", ["coverage", "digest"])
@pytest.mark.parametrize("bucket", [2**12, 2**20])
@pytest.mark.parametrize("kind", [EveryRealNameOnce, OneOfThemOnce])
@pytest.mark.parametrize("mode", STAGED)
def test_one_that_does_less_at_a_later_push_leaves_no_version_that_it_did_not_write(
    mode: str, kind: type[EveryRealNameOnce], bucket: int, check: str
) -> None:
    served, source = kind(), trained(1)
    receiver = Receiver(served)
    with rankcast.connect(receiver, source, mode=mode, bucket_bytes=bucket, check=check, timeout=20) as sync:
        sync.push("1")
        assert torch.equal(served.w, source.get_parameter("w"))
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(1)
        with pytest.raises(PushError, match=r"copied 0 elements to where v lies, and 1,200 when it was traced"):
            sync.push("2")
        assert not receiver.servable
        assert receiver.weight_version == ""
        served.real.clear()
        sync.push("3")
        assert torch.equal(served.v, source.get_parameter("v"))
        assert torch.equal(served.w, source.get_parameter("w"))


@pytest.mark.parametrize("mode", STAGED)
def test_one_that_writes_more_than_it_was_given_or_in_another_order_is_pushed(mode: str) -> None:
    class Twice(nn.Module):
        """Clears what it fills, and fills it in two halves, the second one first."""

        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.zeros(40, 30))
            self.w = nn.Parameter(torch.zeros(64, 48))

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                own, half = self.get_parameter(name).data, tensor.shape[0] // 2
                own[half:].copy_(tensor[half:])
                own[:half].copy_(tensor[:half] + 0)

    served, source = Twice(), trained(1)
    with rankcast.connect(Receiver(served), source, mode=mode) as sync:
        for version in "12":
            sync.push(version)
            assert torch.equal(served.w, source.get_parameter("w"))
