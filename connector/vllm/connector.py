"""PdBusConnector: what vLLM loads. Every method is one call of the side that it is made on."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from pdbus.bus.hashing import prompt_digest
from pdbus.bus.wire import pack_u32

from .control import Control
from .copies import CopiesEnded, StepCopies
from .model import check_version, shape_of
from .scheduling import SchedulerSide
from .settings import Settings, settings_of
from .working import WorkerSide


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    copies: StepCopies


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """`ended`: of each rank. vLLM puts those of all ranks together, step by step."""

    ended: tuple[CopiesEnded, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata((*self.ended, *other.ended))


class PdBusConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half or the other, by `role`. Raises ConfigError for a server whose KV cannot be handed over."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        settings = _settings(vllm_config.kv_transfer_config)
        shape = shape_of(vllm_config, kv_cache_config, version=vllm_version, fingerprint=settings.fingerprint)
        self._control: Control | None = None
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerSide(shape.layers, shape.page_bytes, shape.head_runs, get_tensor_model_parallel_rank())
            return
        self._control = control = Control(settings, shape)
        control.start()
        self._scheduler = SchedulerSide(
            settings.role,
            shape.geometry.block_size,
            control.slabs,
            control,
            digest=lambda ids: prompt_digest(pack_u32(ids)),
            new_id=lambda: secrets.token_bytes(16),
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A prompt that is not handed over is computed by the decode server."""
        return False

    # ------------------------------------------------------------ scheduler

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._scheduling.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, WorkerMetadata):
            self._scheduling.copied(told.ended)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's blocks may go at once: what peers read is a copy."""
        self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # ------------------------------------------------------------ worker

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._working.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads have ended before the forward pass began."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves come after it."""

    def wait_for_save(self) -> None:
        self._working.save(self._step())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.take_wrong_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        ended = self._working.take_ended()
        return WorkerMetadata((ended,)) if ended is not None else None

    def _step(self) -> StepCopies:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step.copies

    # ------------------------------------------------------------ both

    def shutdown(self) -> None:
        if self._control is not None:
            self._control.stop()
        if self._worker is not None:
            self._worker.close()


def _settings(transfer: Any) -> Settings:
    return settings_of(
        transfer.kv_connector_extra_config,
        kv_role=transfer.kv_role,
        buffer_device=transfer.kv_buffer_device,
        environment=os.environ,
        unique=str(transfer.engine_id)[:8],
    )
