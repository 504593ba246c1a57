# SPDX-License-Identifier: Apache-2.0
"""The bytes of a row that a group fills: the scheduler derives what vLLM's worker registers."""

from __future__ import annotations

import contextlib
import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.core.kv_cache_utils import KVCacheGroupSpec
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.worker.utils import allocate_kv_cache

from mimo_plugin.engines.vllm.tiers.layout import (
    RowLayout,
    check_refs,
    merged,
    row_layout,
)
from mimo_plugin.errors import FeatureUnavailable
from tests.published_models import (
    GEMMA3_27B,
    GPT_OSS_20B,
    MIMO_V2_5_PRO,
    MIMO_V2_FLASH,
    REPORT_10F_60S,
)
from tests.vllm_tiers.configs import (
    block_bytes,
    config_of,
    hybrid,
    layer_specs,
    planning,
    vllm_config,
)

PAGE = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT


class Rows:
    """Rows of host memory in which each rank's tensors are vLLM's own views."""

    def __init__(self, config, group_ids, *, world_size=1, blocks_per_chunk=1, layout="LBHNC"):
        self.config, self.group_ids, self.world_size = config, group_ids, world_size
        self.blocks_per_chunk = blocks_per_chunk
        self.worker_row_bytes = block_bytes(config) * blocks_per_chunk
        whole = self.worker_row_bytes * world_size
        self.row_bytes = -(-whole // PAGE) * PAGE
        self.kv_caches = self._registered(layout)

    def _registered(self, layout):
        """What the connector hands to its worker."""
        got: list[Any] = []
        spec = SimpleNamespace(
            replicated_layout=False,
            config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0)),
            get_worker=got.append,
        )
        tensors = allocate_kv_cache(self.config, torch.device("cpu"), KVCacheLayout[layout])
        connector = OffloadingConnectorWorker(spec, vllm_config(layout), self.config)
        connector.register_kv_caches(tensors)
        return got[0]

    def layout(self, **changes: Any) -> RowLayout:
        arguments = {
            "world_size": self.world_size,
            "worker_row_bytes": self.worker_row_bytes,
            "row_bytes": self.row_bytes,
            **changes,
        }
        return row_layout(self.config, self.group_ids, **arguments)

    def filled(self) -> list[np.ndarray]:
        """For each group, which bytes of a row its layers' copies write."""
        masks = []
        for refs in self.kv_caches.group_data_refs:
            with self._region() as open_region:
                for rank in range(self.world_size):
                    region = open_region(rank)
                    views = [
                        region.create_next_worker_view(t.page_size_bytes * self.blocks_per_chunk)
                        for t in self.kv_caches.tensors
                    ]
                    for ref in refs:
                        view = views[ref.tensor_idx]
                        stride = view.shape[1] // self.blocks_per_chunk
                        for block in range(self.blocks_per_chunk):
                            at = block * stride
                            view[0, at : at + ref.page_size_bytes] = 1
                    views.clear()
                masks.append(np.frombuffer(bytes(region.mmap_obj[: self.row_bytes]), np.uint8) == 1)
        return masks

    @contextlib.contextmanager
    def _region(self):
        name, opened = uuid.uuid4().hex, []

        def open_region(rank):
            opened.append(
                SharedOffloadRegion(
                    engine_id=name,
                    num_chunks=1,
                    rank=rank,
                    kv_bytes_per_chunk=self.row_bytes,
                    cpu_page_size=self.worker_row_bytes,
                )
            )
            return opened[-1]

        try:
            yield open_region
        finally:
            for region in opened:
                region.cleanup()


def mask_of(layout: RowLayout, group: int) -> np.ndarray:
    mask = np.zeros(layout.row_bytes, bool)
    for start, end in layout.parts[group]:
        mask[start:end] = True
    return mask


def check(rows: Rows) -> RowLayout:
    layout = rows.layout()
    assert len(layout.parts) == len(rows.group_ids)
    for group, filled in enumerate(rows.filled()):
        assert np.array_equal(filled, mask_of(layout, group)), group
        assert layout.group_bytes(group) == filled.sum()
    for rank in range(rows.world_size):
        check_refs(
            layout,
            rows.kv_caches,
            rank=rank,
            worker_row_bytes=rows.worker_row_bytes,
            blocks_per_chunk=rows.blocks_per_chunk,
        )
    return layout


def everything(config: Any) -> tuple[int, ...]:
    return tuple(range(len(config.kv_cache_groups)))


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "model",
    [MIMO_V2_FLASH, REPORT_10F_60S, MIMO_V2_5_PRO, GPT_OSS_20B, GEMMA3_27B],
    ids=["flash", "10f60s", "pro", "gpt-oss", "gemma3"],
)
def test_published_models(model, drafts, world_size, blocks_per_chunk):
    config = config_of(hybrid(layer_specs(model, tp=8, drafts=drafts)))
    rows = Rows(
        config, everything(config), world_size=world_size, blocks_per_chunk=blocks_per_chunk
    )
    layout = check(rows)
    widest = max(layout.group_bytes(group) for group in everything(config))
    assert widest == world_size * rows.worker_row_bytes
    kinds = ["full" if type(g.kv_cache_spec) is FullAttentionSpec else "swa"
             for g in config.kv_cache_groups]  # fmt: skip
    assert list(layout.kinds) == kinds


def test_padded_pages_are_left_out():
    """Wider pages of one kind of layers set the stride of the others'."""
    specs = {
        "a": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32),
        "b": SlidingWindowSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=8,
            dtype=torch.float32,
            page_size_padded=2048,
            sliding_window=32,
        ),
    }
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    config = config_of(groups)
    for blocks_per_chunk in (1, 4):
        rows = Rows(config, (0, 1), world_size=2, blocks_per_chunk=blocks_per_chunk)
        layout = check(rows)
        assert layout.group_bytes(0) == 2 * layout.group_bytes(1) == 4096 * blocks_per_chunk


def test_groups_of_different_sizes_and_a_part_of_them():
    """The tensors are those of the groups that are offloaded, in their order."""
    common = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full, window = FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=32)
    groups = [
        KVCacheGroupSpec(["a"], full),
        KVCacheGroupSpec(["b", "c", "d"], window, is_eagle_group=True),
        KVCacheGroupSpec(["e", "f"], window),
    ]
    config = config_of(groups)
    layout = check(Rows(config, (0, 1, 2), world_size=2))
    assert layout.kinds == ("full", "draft", "swa")
    assert [layout.group_bytes(group) for group in range(3)] == [2048, 6144, 4096]


def test_one_group_with_pages_of_several_sizes():
    specs = {
        name: FullAttentionSpec(block_size=16, num_kv_heads=h, head_size=8, dtype=torch.float32)
        for name, h in (("a", 1), ("b", 2), ("c", 1))
    }
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))
    config = config_of([group])
    rows = Rows(config, (0,), blocks_per_chunk=2)
    layout = check(rows)
    # The scheduler is told but one of the specs.
    rows.config = planning().generate_scheduler_kv_cache_config([config])
    assert rows.layout() == layout and layout.group_bytes(0) == 2 * 4096


def test_packed_blocks_are_taken_whole():
    specs = {
        name: FullAttentionSpec(block_size=16, num_kv_heads=h, head_size=8, dtype=torch.float32)
        for name, h in (("a", 1), ("b", 2))
    }
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32
    )
    groups = [
        KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs)),
        KVCacheGroupSpec(["w"], window),
    ]
    config = config_of(groups, layout="BLHNC")
    rows = Rows(config, (0, 1), world_size=2, blocks_per_chunk=2, layout="BLHNC")
    layout = check(rows)
    assert layout.group_bytes(0) == layout.group_bytes(1) == 2 * rows.worker_row_bytes
    rows.config = planning().generate_scheduler_kv_cache_config([config])
    assert rows.layout() == layout


def test_pages_apart_are_refused():
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=6, dtype=torch.float32, block_stride_alignment=512
    )
    config = config_of([KVCacheGroupSpec(["a", "b"], spec)])
    with pytest.raises(
        FeatureUnavailable, match="layer a: pages 1024 bytes apart.* LBHNC"
    ) as error:
        row_layout(config, (0,), world_size=1, worker_row_bytes=2048, row_bytes=4096)
    assert "\n" not in str(error.value)


def worker(rows: Rows, layout: RowLayout, **changes: Any) -> None:
    arguments = {
        "rank": 0,
        "worker_row_bytes": rows.worker_row_bytes,
        "blocks_per_chunk": rows.blocks_per_chunk,
        **changes,
    }
    check_refs(layout, rows.kv_caches, **arguments)


def test_what_differs_in_the_worker_is_refused():
    config = config_of(hybrid(layer_specs(MIMO_V2_FLASH, tp=8)))
    rows = Rows(config, everything(config), world_size=2, blocks_per_chunk=2)
    layout = rows.layout()
    worker(rows, layout)
    refs = rows.kv_caches.group_data_refs
    changes = []
    # A group more, a layer less, a smaller page, a tensor more, groups in another order.
    changes.append(lambda: refs.append(refs[0]))
    changes.append(lambda: refs[0].pop())
    changes.append(lambda: setattr(refs[1][0], "page_size_bytes", refs[1][0].page_size_bytes - 1))
    changes.append(lambda: rows.kv_caches.tensors.append(rows.kv_caches.tensors[0]))
    for change in changes:
        change()
        with pytest.raises(FeatureUnavailable, match="found in the worker .* scheduler") as error:
            worker(rows, layout)
        assert "\n" not in str(error.value)
        rows.kv_caches = rows._registered("LBHNC")
        refs = rows.kv_caches.group_data_refs
        worker(rows, layout)
    with pytest.raises(FeatureUnavailable, match="found in the worker"):
        worker(rows, layout, blocks_per_chunk=1)
    with pytest.raises(FeatureUnavailable, match="found in the worker"):
        worker(rows, layout, rank=2)


def test_a_row_that_holds_no_whole_blocks_is_refused():
    config = config_of(hybrid(layer_specs(MIMO_V2_FLASH, tp=8)))
    rows = Rows(config, everything(config))
    with pytest.raises(FeatureUnavailable, match="of a block"):
        rows.layout(worker_row_bytes=rows.worker_row_bytes - 1)


def share(model: dict[str, Any], tp: int) -> tuple[list[int], int]:
    """Bytes of each group, and of a row, of one rank."""
    config = config_of(hybrid(layer_specs(model, tp=tp)))
    size = block_bytes(config)
    layout = row_layout(
        config, everything(config), world_size=1, worker_row_bytes=size, row_bytes=size
    )
    return [layout.group_bytes(group) for group in everything(config)], size


#: of a row, in layers: how many each group fills, and how many there is room for
FILLED = {
    "flash": (MIMO_V2_FLASH, [9, 8, 8, 8, 8, 7], 9),
    "pro": (MIMO_V2_5_PRO, [10] * 7, 10),
    "gpt-oss": (GPT_OSS_20B, [12, 12], 12),
    "gemma3": (GEMMA3_27B, [9, 9, 9, 9, 8, 8, 10], 10),
}


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", FILLED)
def test_rows_are_not_full(name, tp):
    """Counted in rows, the groups would take more than they hold."""
    model, filled, room = FILLED[name]
    found, size = share(model, tp)
    assert [count * room / size for count in found] == filled


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_merged_ranges_hold_the_same_bytes(ranges):
    expected = {byte for start, end in ranges for byte in range(start, end)}
    found = merged(ranges)
    assert {byte for start, end in found for byte in range(start, end)} == expected
    bounds = [byte for part in found for byte in part]
    assert bounds == sorted(set(bounds)), "ranges touch, overlap or are empty"
