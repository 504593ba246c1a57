# SPDX-License-Identifier: Apache-2.0
"""Copies KV between the engine's memory and host memory where both are the same.

On a machine without a GPU the second tier is not faster than the first: this is for development and
tests, in which all else is what runs on a GPU machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from mimo_plugin.errors import FeatureUnavailable


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """One rank's copies, done at once.

    Args:
        kv_caches: vLLM's description of the engine's KV.
        region: host memory, rows of chunks; owned from now on.

    Raises:
        FeatureUnavailable: the engine's memory is a device's.
    """

    def __init__(self, kv_caches: Any, region: Any) -> None:
        devices = {each.tensor.device.type for each in kv_caches.tensors}
        if devices != {"cpu"} or not current_platform.is_cpu():
            raise FeatureUnavailable(
                f"copy worker for CPUs: found KV on {', '.join(sorted(devices))} and platform "
                f"{current_platform.device_name}; needed: an engine on CPU; fix: use vLLM's own "
                "worker"
            )
        self._region = region
        self._device = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        self._host = [
            region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors
        ]
        #: (tensor, bytes) of each layer, by group
        self._layers = [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks to rows."""
        return self._copy(job_id, src_spec, dst_spec.block_ids, to_host=True)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Rows to blocks; from vLLM 0.33 on some loads are urgent, here all are done at once."""
        return self._copy(job_id, dst_spec, src_spec.block_ids, to_host=False)

    def _copy(self, job_id: int, device: Any, rows: Any, *, to_host: bool) -> bool:
        started, moved, at = time.monotonic(), 0, 0
        for layers, count in zip(self._layers, device.group_sizes, strict=True):
            part = slice(at, at + count)
            moved += self._copy_group(layers, device.block_ids[part], rows[part], to_host=to_host)
            at += count
        assert at == len(rows)
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - started))
        return True

    def _copy_group(
        self, layers: Sequence[tuple[int, int]], blocks: Any, rows: Any, *, to_host: bool
    ) -> int:
        if not len(blocks):
            return 0
        on_device, on_host = torch.from_numpy(blocks).long(), torch.from_numpy(rows).long()
        for tensor, size in layers:
            device, host = self._device[tensor], self._host[tensor]
            if to_host:
                host[on_host, :size] = device[on_device, :size]
            else:
                device[on_device, :size] = host[on_host, :size]
        return len(blocks) * sum(size for _, size in layers)

    def get_finished(self) -> list[Any]:
        """Jobs that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Let go of host memory."""
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None
