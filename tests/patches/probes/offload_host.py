# SPDX-License-Identifier: Apache-2.0
"""Offloading on a CPU-only engine: vLLM's tiering, with a worker that copies at once.

Host memory is the region that the secondary tiers read, so that all tiers of vLLM can sit below.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


@dataclass(frozen=True)
class Load:
    """One load into device blocks."""

    blocks: list[list[int]]
    """Device blocks of each group."""
    starts: list[int]
    """Index of each group's first block in its request."""
    size_bytes: int


LOADS: list[Load] = []
"""Every load of this process, in order."""


class HostTieringSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` whose worker needs no GPU."""

    def get_worker(self, kv_caches: Any) -> Any:
        """Make the worker, once."""
        if self._worker is None:
            assert self.blocks_per_chunk == 1, "one block a chunk is all this worker copies"
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies whole blocks between the KV cache and rows of the region."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        pages = [each.page_size_bytes for each in kv_caches.tensors]
        self.region = region
        self.device = [
            each.tensor.view(torch.int8).view(-1, page)
            for each, page in zip(kv_caches.tensors, pages, strict=True)
        ]
        self.host = [region.create_next_worker_view(page) for page in pages]
        #: tensors that hold KV of each group
        self.tensors_of = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self.done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy to host memory."""
        self.copy(job_id, src_spec, dst_spec.block_ids, to_host=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy to the device, and note what."""
        size = self.copy(job_id, dst_spec, src_spec.block_ids, to_host=False)
        ids, blocks = iter(dst_spec.block_ids.tolist()), []
        for count in dst_spec.group_sizes:
            blocks.append([next(ids) for _ in range(count)])
        LOADS.append(Load(blocks, [int(start) for start in dst_spec.block_indices], size))
        return True

    def copy(self, job_id: int, device_spec: Any, rows: Any, *, to_host: bool) -> int:
        """Copy a job's blocks; returns bytes."""
        started, size, at = time.monotonic(), 0, 0
        for group, count in enumerate(device_spec.group_sizes):
            for block, row in zip(
                device_spec.block_ids[at : at + count], rows[at : at + count], strict=True
            ):
                for index in self.tensors_of[group]:
                    device, host = self.device[index][int(block)], self.host[index][int(row)]
                    source, target = (device, host) if to_host else (host, device)
                    target.copy_(source)
                    size += source.numel()
            at += count
        assert at == len(rows)
        self.done.append(TransferResult(job_id, True, size, time.monotonic() - started))
        return size

    def get_finished(self) -> list[Any]:
        """Jobs since the last call: all of them."""
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Nothing is ever pending."""

    def shutdown(self) -> None:
        """Remove the file of the region."""
        self.host = []
        self.region.cleanup()
