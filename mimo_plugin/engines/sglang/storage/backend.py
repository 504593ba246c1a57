# SPDX-License-Identifier: Apache-2.0
"""HiCache's L3 over a page store: ``--hicache-storage-backend dynamic`` with this class.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "mimo", "interface_v1": 1,
        "module_path": "mimo_plugin.engines.sglang.storage.backend",
        "class_name": "MimoStorage", "path": "/data/kv", "capacity_gib": 500}'

A page goes between the host pool and the store without a copy, as the runs of memory that the pool
names. So nothing here knows how wide keys and values are, and pools of unequal widths (MiMo-V2)
work, which the flat pages of SGLang's own file backend do not take. A prefix is found up to the
longest length that every pool can restore; a window of which a page is missing costs the lengths
that need it, not the hit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from mimo_plugin.engines.sglang.storage.keepalive import KeepAlive, pages_of, prefix_hashes
from mimo_plugin.engines.sglang.storage.pages import (
    ALL,
    TRAILING,
    common_ends,
    key_space,
    leading,
    legal_ends,
    parts_of,
)
from mimo_plugin.errors import nearest, setting_error
from mimo_plugin.tiers.file_store import FileStore
from mimo_plugin.tiers.store import PageStore, Parts

logger = logging.getLogger("sglang.mimo_plugin")

SECTION = "hicache-storage-backend-extra-config"
_OURS = ("path", "capacity_gib", "verify", "name")
_ENGINE = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
_POLICIES = {PoolHitPolicy.ALL_PAGES: ALL, PoolHitPolicy.TRAILING_PAGES: TRAILING}


class MimoStorage(HiCacheStorage):  # type: ignore[misc]
    """One per rank.

    Args:
        storage_config: SGLang's, with the user's settings in ``extra_config``.
        kwargs: not used.

    Raises:
        ConfigError: a setting is unknown or out of range.
        StoreError: the store can't be opened.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.config = storage_config
        self.store: PageStore = open_store(storage_config.extra_config or {})
        self.registered_pools: dict[str, Any] = {}
        self._spaces: dict[str, str] = {}
        self.keeper = KeepAlive(self._touch)

    # -- pools ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's pool of full-attention KV."""
        super().register_mem_pool_host(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One more pool."""
        self.registered_pools[str(host_pool_name)] = host_pool

    def on_host_pools_registered(self) -> None:
        """All pools are known: try that each can name the memory of a page.

        Raises:
            ConfigError: a pool's layout can't.
        """
        for name in {str(PoolName.KV), *self.registered_pools}:
            pool = self._pool(name)
            try:
                self._pages(pool, torch.arange(pool.page_size))
            except (ValueError, NotImplementedError, AttributeError) as error:
                raise setting_error(
                    "hicache-mem-layout",
                    getattr(pool, "layout", "none"),
                    f"a layout in which pool {name} can name the memory of a page ({error})",
                    "use --hicache-mem-layout page_first or page_first_direct",
                ) from error
            self._space(name)
        logger.info("mimo storage: pools %s in %s", ", ".join(self._spaces), self.store)

    def _pool(self, name: str) -> Any:
        found = self.registered_pools.get(name)
        return self.mem_pool_host if found is None else found

    def _pages(self, pool: Any, indices: torch.Tensor) -> list[Parts]:
        addresses, sizes = pool.get_page_buffer_meta(indices)
        return parts_of(addresses, sizes, len(indices) // pool.page_size)

    def _space(self, name: str) -> str:
        found = self._spaces.get(name)
        if found is None:
            found = self._spaces[name] = key_space(facts_of(self.config, name, self._pool(name)))
        return found

    def _keys(self, name: str, hashes: Sequence[str]) -> list[str]:
        space = self._space(name)
        return [f"{space}/{page_hash}" for page_hash in hashes]

    # -- what is there -------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Pages of full-attention KV before the first that is missing."""
        return leading(self.store.exists(self._keys(PoolName.KV.value, keys)))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How long a prefix can be restored from all pools together."""
        kv_pages = self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        pools = [list(range(1, kv_pages + 1))]
        for transfer in pool_transfers or ():
            policy = _POLICIES.get(transfer.hit_policy)
            if policy is None:
                continue  # a second form of what is there: it never decides
            found = self.store.exists(self._keys(transfer.name.value, keys[:kv_pages]))
            ends = legal_ends(found, policy, max(1, len(transfer.keys or ())))
            if ends:
                hits[transfer.name] = ends[-1]
            pools.append(ends)
        ends = common_ends(pools)
        return PoolTransferResult(ends[-1] if ends else 0, hits, ends)

    def exists(self, key: str) -> bool:
        """Whether one page of full-attention KV is there."""
        return self.batch_exists([key]) == 1

    def keep_alive(self, tree_core: Any, node: Any, window_pages: int) -> None:
        """A higher tier answers with the prefix that ends in a node of the tree: touch its pages.

        Args:
            tree_core: of SGLang's radix cache.
            node: where the prefix ends.
            window_pages: what a window takes at its end.
        """
        last = tree_core.get_last_hash_value(node)
        if not last or not self.keeper.due(last):
            return
        others = [name for name in self.registered_pools if name != PoolName.KV.value]
        hashes = prefix_hashes(tree_core, node)
        self.keeper.add(pages_of(hashes, PoolName.KV.value, others, window_pages))

    def _touch(self, pages: Mapping[str, Sequence[str]]) -> None:
        for name, hashes in pages.items():
            self.store.touch(self._keys(name, hashes))

    # -- transfers -----------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages of full-attention KV into the host pool."""
        return self._move(self.store.get, PoolName.KV.value, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Write pages of full-attention KV from the host pool."""
        return self._move(self.store.put, PoolName.KV.value, keys, host_indices)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of other pools."""
        return {t.name: self._transfer(self.store.get, t) for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Write pages of other pools."""
        return {t.name: self._transfer(self.store.put, t) for t in transfers}

    def _transfer(self, action: Any, transfer: Any) -> list[bool]:
        return self._move(action, transfer.name.value, transfer.keys or [], transfer.host_indices)

    def _move(
        self, action: Any, name: str, hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        pool = self._pool(name)
        if host_indices is None or host_indices.numel() != len(hashes) * pool.page_size:
            logger.error(
                "mimo storage: pool %s: found slots for %s tokens; needed: %d pages of %d",
                name,
                None if host_indices is None else host_indices.numel(),
                len(hashes),
                pool.page_size,
            )
            return [False] * len(hashes)
        done: list[bool] = action(self._keys(name, hashes), self._pages(pool, host_indices))
        return done

    # -- single pages: SGLang asks for them only without interface_v1 ---------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Not offered: pages go in place."""
        raise _wrong_interface()

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Not offered: pages go in place."""
        raise _wrong_interface()

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not offered: pages go in place."""
        raise _wrong_interface()

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not offered: pages go in place."""
        raise _wrong_interface()

    def close(self) -> None:
        """Let go of the store."""
        self.keeper.close()
        self.store.close()


def _wrong_interface() -> Exception:
    return setting_error(
        f"{SECTION}.interface_v1", "0", "1", "set it: pages are read and written in place"
    )


def facts_of(config: Any, name: str, pool: Any) -> dict[str, object]:
    """What decides the meaning of the bytes of a pool's page on this rank."""
    extra = config.extra_config or {}
    shape = ("dtype", "page_size", "layer_num", "head_num", "head_dim", "v_head_dim", "layout")
    ranks = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
    facts: dict[str, object] = {field: str(getattr(pool, field, None)) for field in shape}
    facts.update({field: getattr(config, field, None) for field in ranks})
    if getattr(config, "is_mla_model", False) and name == PoolName.KV.value:
        # Every rank holds the same, and one writes for all.
        facts.update({"tp_rank": 0, "tp_size": 1})
    return {**facts, "pool": name, "model": config.model_name, "name": extra.get("name", "")}


def open_store(extra: dict[str, Any]) -> PageStore:
    """The store that the settings name.

    Raises:
        ConfigError: a setting is unknown or out of range.
        StoreError: it can't be opened.
    """
    for setting in extra:
        if setting not in (*_OURS, *_ENGINE):
            hint = nearest(setting, _OURS)
            raise setting_error(
                f"{SECTION}.{setting}",
                extra[setting],
                f"one of {', '.join(_OURS)}",
                f"write {hint}" if hint else "remove it",
            )
    path = extra.get("path")
    if not isinstance(path, str) or not path:
        raise setting_error(f"{SECTION}.path", path, "a folder", "name one")
    capacity = extra.get("capacity_gib")
    if isinstance(capacity, bool) or not isinstance(capacity, (int, float)) or capacity <= 0:
        raise setting_error(
            f"{SECTION}.capacity_gib", capacity, "a number above 0", "say how much may be stored"
        )
    verify = extra.get("verify", True)
    if not isinstance(verify, bool):
        raise setting_error(f"{SECTION}.verify", verify, "true or false", "change it")
    return FileStore(Path(path), capacity_bytes=int(capacity * (1 << 30)), verify=verify)
