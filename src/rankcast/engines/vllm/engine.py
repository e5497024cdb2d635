"""The weight-transfer engine that vLLM creates in each worker when the backend is ``rankcast``.

This module gives vLLM a class of the shape that it wants and puts a receiver behind it. It must not know how the
receiver does its work. The hooks in ``worker_hooks`` hand it every call whole; vLLM's own way in, which parses payloads
and raises, is closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rankcast.engines.vllm.adapter import unsupported_version
from rankcast.engines.vllm.adapter.identity import identity
from rankcast.engines.vllm.installer import LayerwiseInstaller
from rankcast.errors import UnsupportedError
from rankcast.rollout.receiver import Receiver
from rankcast.wire.reports import Report

if TYPE_CHECKING:
    from vllm.config import VllmConfig, WeightTransferConfig


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Never built: init messages reach the receiver as they came."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """Never built: payloads reach the receiver as they came."""


class RankcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # as above
    """A receiver over this worker's model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        unsupported = unsupported_version()
        if unsupported is not None:
            raise UnsupportedError(unsupported)
        self.receiver = Receiver(model, worker=identity(vllm_config), installer=LayerwiseInstaller(model, vllm_config))

    def handle(self, call: str, argument: object = None) -> tuple[Report, bool]:
        """Do one call; never raises. Returns the report, and whether a trainer was told it on its report channel."""
        with set_current_vllm_config(self.vllm_config):
            return self.receiver.answer(call, argument)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        raise self._closed()

    def start_weight_update(self) -> None:
        raise self._closed()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        raise self._closed()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        raise self._closed()

    def finish_weight_update(self) -> None:
        raise self._closed()

    def shutdown(self) -> None:
        self.receiver.close()

    @staticmethod
    def _closed() -> UnsupportedError:
        return UnsupportedError(
            "the rankcast backend was called around its hooks: the plugin must be loaded in every vLLM process "
            "(VLLM_PLUGINS, when set, must name rankcast)"
        )
