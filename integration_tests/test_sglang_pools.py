# SPDX-License-Identifier: Apache-2.0
"""SGLang's own pools and host memory without a model: sizes, round trips, room for stored prefixes.

Keys are 128 wide and values 64, sliding-window layers have twice the KV heads of the others.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mimo_plugin.core.geometry import read_geometry

pytestmark = pytest.mark.sglang

PAGE_TOKENS, FULL_TOKENS, SWA_TOKENS = 16, 512, 256
FULL_LAYERS, SWA_LAYERS = (0, 3), (1, 2, 4)
HEADS = {"full": 4, "swa": 8}
K_DIM, V_DIM, ELEMENT_BYTES = 128, 64, 2
HOST_RATIO = 2.0


@pytest.fixture(scope="module")
def device() -> Any:
    """The two pools of a hybrid model."""
    import torch
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    from integration_tests.sglang_cpu.mimo_sglang_cpu import host_copies

    host_copies.install()
    set_global_server_args_for_scheduler(
        ServerArgs(
            model_path="dummy",
            page_size=PAGE_TOKENS,
            device="cpu",
            enable_hierarchical_cache=True,
            hicache_ratio=HOST_RATIO,
            hicache_mem_layout="page_first_direct",
            hicache_io_backend="direct",
        )
    )
    return SWAKVPool(
        size=FULL_TOKENS,
        size_swa=SWA_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=HEADS["full"],
        swa_head_num=HEADS["swa"],
        head_dim=K_DIM,
        swa_head_dim=K_DIM,
        v_head_dim=V_DIM,
        swa_v_head_dim=V_DIM,
        full_attention_layer_ids=list(FULL_LAYERS),
        swa_attention_layer_ids=list(SWA_LAYERS),
        device="cpu",
    )


def host_group(device: Any) -> Any:
    """Host memory for both pools, as SGLang builds it."""
    import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler

    return assembler.build_hybrid_swa_group(
        page_size=PAGE_TOKENS,
        full_kv_pool=device.full_kv_pool,
        swa_kv_pool=device.swa_kv_pool,
        full_layer_mapping={layer: i for i, layer in enumerate(FULL_LAYERS)},
        swa_layer_mapping={layer: i for i, layer in enumerate(SWA_LAYERS)},
        use_mla=False,
    )


def entry_of(group: Any, kind: str) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return group.entry_map[PoolName.KV if kind == "full" else PoolName.SWA]


def host_bytes(entry: Any) -> int:
    return int(entry.host_pool.size * entry.host_pool.size_per_token)


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "swa"])
def test_keys_and_values_are_sized_by_their_own_widths(device: Any, kind: Any) -> None:
    """B14: the plugin's arithmetic is SGLang's, on the device and on the host."""
    pattern = [int(layer in SWA_LAYERS) for layer in range(len(FULL_LAYERS) + len(SWA_LAYERS))]
    geometry = read_geometry(
        {
            "num_hidden_layers": len(pattern),
            "hybrid_layer_pattern": pattern,
            "sliding_window": 128,
            "num_attention_heads": 16,
            "hidden_size": 16 * K_DIM,
            "head_dim": K_DIM,
            "v_head_dim": V_DIM,
            "num_key_value_heads": HEADS["full"],
            "swa_num_attention_heads": 16,
            "swa_num_key_value_heads": HEADS["swa"],
            "swa_head_dim": K_DIM,
            "swa_v_head_dim": V_DIM,
            "torch_dtype": "bfloat16",
        }
    )
    per_token = geometry.bytes_per_token(kind, element_bytes=ELEMENT_BYTES)
    layers = FULL_LAYERS if kind == "full" else SWA_LAYERS
    assert per_token == len(layers) * HEADS[kind] * (K_DIM + V_DIM) * ELEMENT_BYTES
    pool = device.full_kv_pool if kind == "full" else device.swa_kv_pool
    keys, values = map(int, pool.get_kv_size_bytes())
    tokens = FULL_TOKENS if kind == "full" else SWA_TOKENS
    assert 0 <= keys + values - tokens * per_token <= PAGE_TOKENS * per_token
    assert keys * V_DIM == values * K_DIM
    assert entry_of(host_group(device), kind).host_pool.size_per_token == per_token


def test_host_memory_is_shared_as_the_setting_says(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B65: stock splits it as on the device."""
    import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler

    from mimo_plugin.engines.sglang.storage.hooks import install_host_share

    def split() -> tuple[int, int]:
        group = host_group(device)
        found = host_bytes(entry_of(group, "full")), host_bytes(entry_of(group, "swa"))
        group.destroy()
        return found

    stock = split()
    monkeypatch.setattr(assembler, "build_hybrid_swa_group", assembler.build_hybrid_swa_group)
    share = 0.25
    assert abs(stock[1] / sum(stock) - share) > 0.2, "nothing to see"
    install_host_share(share)
    full, swa = split()
    one_page = PAGE_TOKENS * max(
        entry_of(host_group(device), kind).host_pool.size_per_token for kind in HEADS
    )
    device_bytes = sum(
        sum(map(int, pool.get_kv_size_bytes()))
        for pool in (device.full_kv_pool, device.swa_kv_pool)
    )
    assert abs(full + swa - HOST_RATIO * device_bytes) <= 2 * one_page
    assert abs(swa - share * HOST_RATIO * device_bytes) <= one_page


# --- round trips ----------------------------------------------------------------------------


@pytest.fixture
def storage(device: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend over host memory, as the cache controller puts them together."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from mimo_plugin.engines.sglang.storage import hooks
    from mimo_plugin.engines.sglang.storage.backend import MimoStorage

    monkeypatch.setattr(hooks, "install", lambda: None)
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="m",
        extra_config={"path": str(tmp_path), "capacity_gib": 0.1, "interface_v1": 1},
    )
    group = host_group(device)
    made = MimoStorage(config)
    made.register_mem_pool_host(entry_of(group, "full").host_pool)
    for entry in group.entries:
        made.register_mem_host_pool_v2(entry.host_pool, entry.name)
    made.on_host_pools_registered()
    yield SimpleNamespace(backend=made, group=group)
    made.close()


@pytest.mark.parametrize("kind", ["full", "swa"])
def test_pages_come_back_as_they_were(device: Any, storage: Any, kind: str) -> None:
    """B17: from the device to host memory, the store, and back to other places of each."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

    pool = device.full_kv_pool if kind == "full" else device.swa_kv_pool
    entry = entry_of(storage.group, kind)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    assert {buffer.shape[-1] for buffer in buffers} == {K_DIM, V_DIM}
    assert {buffer.shape[1] for buffer in buffers} == {HEADS[kind]}
    generator = torch.Generator().manual_seed(1)
    for buffer in buffers:
        bits = torch.randint(-(2**15), 2**15, buffer.shape, generator=generator)
        buffer.view(torch.int16).copy_(bits)
    pages = 3
    tokens = pages * PAGE_TOKENS
    source, target = torch.arange(32, 32 + tokens), torch.arange(128, 128 + tokens)
    wanted = [buffer[source].view(torch.int16).clone() for buffer in buffers]

    def moved(write: bool, host: Any) -> list[bool]:
        transfer = PoolTransfer(
            name=entry.name,
            host_indices=host,
            keys=[f"page{i}" for i in range(pages)],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        if kind == "full":
            call = storage.backend.batch_set_v1 if write else storage.backend.batch_get_v1
            done: list[bool] = call(transfer.keys, host)
            return done
        call = storage.backend.batch_set_v2 if write else storage.backend.batch_get_v2
        (found,) = call([transfer]).values()
        return list(found)

    host = entry.host_pool.alloc(tokens)
    entry.host_pool.backup_from_device_all_layer(pool, host, source, "direct")
    assert moved(True, host) == [True] * pages
    entry.host_pool.k_buffer.zero_()
    entry.host_pool.v_buffer.zero_()
    other = entry.host_pool.alloc(tokens)
    assert not set(other.tolist()) & set(host.tolist())
    assert moved(False, other) == [True] * pages
    for layer in range(pool.layer_num):
        entry.host_pool.load_to_device_per_layer(pool, other, target, layer, "direct")
    for buffer, bits in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer[target].view(torch.int16), bits)


def test_pools_that_do_not_match_are_refused_at_start(device: Any) -> None:
    """B17: rows of a draft layer that differ from the target's can't share its host pages."""
    import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler

    group = {
        "page_size": PAGE_TOKENS,
        "full_kv_pool": device.full_kv_pool,
        "swa_kv_pool": device.swa_kv_pool,
        "full_layer_mapping": {0: 0, 3: 1},
        "swa_layer_mapping": {1: 0, 2: 1, 4: 2},
        "use_mla": False,
    }
    with pytest.raises(ValueError, match="draft"):
        assembler.build_hybrid_swa_group(**group, mtp_full_device_pools=(device.swa_kv_pool,))


# --- room for a stored prefix ---------------------------------------------------------------


def controller(device: Any, free_pages: int) -> Any:
    """SGLang's cache controller, as far as finding room needs it, with hooks installed."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    from mimo_plugin.engines.sglang.storage import hooks

    hooks.install()
    made = object.__new__(HybridCacheController)
    made.mem_pool_host = host_group(device)
    made.page_size = PAGE_TOKENS
    made.prefetch_hits_sync_groups = []
    cuts: list[int] = []
    made.storage_backend = SimpleNamespace(cut=cuts.append, cuts=cuts)
    pool = made.mem_pool_host
    assert pool.alloc(pool.available_size() - free_pages * PAGE_TOKENS) is not None
    return made


def operation(ends: list[int], pages: int) -> Any:
    from sglang.srt.mem_cache.hicache_storage import (
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )

    window = PoolTransfer(
        name=PoolName.SWA, keys=["x"] * 8, hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    return SimpleNamespace(
        pool_transfers=[window],
        pool_storage_result=PoolTransferResult(pages, {}, ends),
        query_pool_hit_pages={},
        token_ids=range(pages * PAGE_TOKENS),
    )


@pytest.mark.parametrize(
    ("free_pages", "ends", "kept_pages"),
    [
        (43, [8, 20, 43], 43),
        (25, [8, 20, 43], 20),
        (20, [8, 20, 43], 20),
        (25, [30, 43], 0),
        (7, [4, 43], 0),  # fewer than are worth it
    ],
)
def test_a_hit_that_host_memory_cuts_ends_where_it_can_be_restored(
    device: Any, free_pages: int, ends: list[int], kept_pages: int
) -> None:
    """B20: stock takes what fits; a window that was not stored there costs the whole hit."""
    target = controller(device, free_pages)
    asked = operation(ends, 43)
    assert target._sync_prefetch_hit_query(asked, 43 * PAGE_TOKENS) == 43 * PAGE_TOKENS
    indices, tokens = target.allocate_storage_hit(
        asked,
        43 * PAGE_TOKENS,
        allow_partial=True,
        min_tokens=5 * PAGE_TOKENS,
        evict_host=lambda tokens: 0,
    )
    assert tokens == kept_pages * PAGE_TOKENS
    assert (0 if indices is None else len(indices)) == tokens
    assert target.mem_pool_host.available_size() == (free_pages - kept_pages) * PAGE_TOKENS
    cut = (43 - kept_pages) * PAGE_TOKENS
    assert target.storage_backend.cuts == ([cut] if cut else [])


def test_a_hit_that_waits_for_room_is_not_counted_as_cut(device: Any) -> None:
    target = controller(device, 25)
    indices, _ = target.allocate_storage_hit(
        operation([8, 43], 43),
        43 * PAGE_TOKENS,
        allow_partial=False,
        min_tokens=PAGE_TOKENS,
        evict_host=lambda tokens: 0,
    )
    assert indices is None and target.storage_backend.cuts == []
    assert target.mem_pool_host.available_size() == 25 * PAGE_TOKENS


def test_settings_are_json(device: Any, tmp_path: Any) -> None:
    """What the feature writes is what the backend reads."""
    from mimo_plugin.config_tiers import TiersConfig
    from mimo_plugin.engines.sglang.storage.arguments import backend_arguments, open_store

    config = TiersConfig(path=str(tmp_path), capacity_gib=1)
    (backend, extra) = backend_arguments(config).values()
    assert backend == "dynamic"
    open_store(json.loads(extra)).close()
