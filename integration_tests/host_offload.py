# SPDX-License-Identifier: Apache-2.0
"""Offloading specification whose second tier is host memory on a CPU-only engine.

vLLM's own worker copies with CUDA streams. Everything else, the OffloadingConnector and the
scheduler's half of the offloading, is vLLM's: this module only copies blocks, at once.
"""

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    """``CPUOffloadingSpec`` with a worker that needs no GPU."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            assert self.blocks_per_chunk == 1, "one block a chunk is all this worker copies"
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies whole blocks between the engine's KV cache and a table of chunks, synchronously."""

    def __init__(self, kv_caches, num_chunks):
        self.device = [each.tensor for each in kv_caches.tensors]
        self.host = [
            torch.zeros((num_chunks, *tensor.shape[1:]), dtype=tensor.dtype)
            for tensor in self.device
        ]
        #: tensors that hold KV of each group
        self.tensors_of = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec.block_ids, to_host=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec.block_ids, to_host=False)

    def _copy(self, job_id, device_spec, chunks, *, to_host):
        started, size, at = time.monotonic(), 0, 0
        for group, count in enumerate(device_spec.group_sizes):
            for block, chunk in zip(
                device_spec.block_ids[at : at + count], chunks[at : at + count], strict=True
            ):
                for index in self.tensors_of[group]:
                    device, host = self.device[index][int(block)], self.host[index][int(chunk)]
                    source, target = (device, host) if to_host else (host, device)
                    target.copy_(source)
                    size += source.numel() * source.element_size()
            at += count
        assert at == len(chunks)
        self._finished.append(TransferResult(job_id, True, size, time.monotonic() - started))
        return True

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass
