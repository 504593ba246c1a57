# SPDX-License-Identifier: Apache-2.0
"""A script of :mod:`tiers_probe` without an engine: the worker that copies on a CPU."""

import os
import random


def copies(model, folder, options):
    """B67: blocks are stored, overwritten at once, and restored; bytes that differ."""
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from mimo_plugin.engines.vllm.tiers.copy_worker import HostCopyWorker

    blocks, rows, page_bytes = 24, 16, (4096, 2048)
    row_bytes = 2 * SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
    tensors = [torch.zeros(blocks, size, dtype=torch.int8) for size in page_bytes]
    # one group of both tensors, one of a part of the first
    groups = [[(0, 4096), (1, 2048)], [(0, 1000)]]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors],
        [[CanonicalKVCacheRef(at, size) for at, size in refs] for refs in groups],
    )
    region = SharedOffloadRegion(
        engine_id=f"copies-{os.getpid()}",
        num_chunks=rows,
        rank=0,
        kv_bytes_per_chunk=row_bytes,
        cpu_page_size=row_bytes,
    )
    worker = HostCopyWorker(caches, region)
    rng, generator = random.Random(8), torch.Generator().manual_seed(8)
    wrong = moved = 0
    for round_ in range(options["rounds"]):
        count = [rng.randrange(0, 4), rng.randrange(1, 4)]
        source = rng.sample(range(blocks), sum(count))
        target = rng.sample(range(blocks), sum(count))
        chosen = rng.sample(range(rows), sum(count))
        for tensor in tensors:
            tensor.random_(-128, 128, generator=generator)
        before = [tensor.clone() for tensor in tensors]
        worker.submit_store(
            2 * round_, GPULoadStoreSpec(source, count, [0, 0]), CPULoadStoreSpec(chosen)
        )
        for tensor in tensors:
            tensor.fill_(round_ % 100)
        worker.submit_load(
            2 * round_ + 1, CPULoadStoreSpec(chosen), GPULoadStoreSpec(target, count, [0, 0])
        )
        expected = [torch.full_like(tensor, round_ % 100) for tensor in tensors]
        for at, (old, new) in enumerate(zip(source, target, strict=True)):
            for tensor, size in groups[0 if at < count[0] else 1]:
                expected[tensor][new, :size] = before[tensor][old, :size]
        wrong += sum(
            int((one != other).sum()) for one, other in zip(tensors, expected, strict=True)
        )
        moved += sum(result.transfer_size for result in worker.get_finished())
    worker.shutdown()
    return {"wrong_bytes": wrong, "moved_bytes": moved}
