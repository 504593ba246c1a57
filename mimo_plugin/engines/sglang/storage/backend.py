# SPDX-License-Identifier: Apache-2.0
"""HiCache's L3 over a page store: the feature ``tiers``; SGLang names the backend ``dynamic``.

A page goes between the host pool and the store without a copy, as the runs of memory that the pool
names. So nothing here knows how wide keys and values are, and pools of unequal widths (MiMo-V2)
work, which the flat pages of SGLang's own file backend do not take. A prefix is found up to the
longest length that every pool can restore; a window of which a page is missing costs the lengths
that need it, not the hit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from mimo_plugin.engines.prometheus import PrometheusSink
from mimo_plugin.engines.sglang.storage import hooks
from mimo_plugin.engines.sglang.storage.accounting import TierAccounting, make_sink
from mimo_plugin.engines.sglang.storage.arguments import SECTION, open_store
from mimo_plugin.engines.sglang.storage.install import start_up, started
from mimo_plugin.engines.sglang.storage.keepalive import KeepAlive, pages_of, prefix_hashes
from mimo_plugin.engines.sglang.storage.pages import (
    ALL,
    TRAILING,
    common_ends,
    leading,
    legal_ends,
    parts_of,
)
from mimo_plugin.errors import setting_error
from mimo_plugin.tiers.keys import key_space
from mimo_plugin.tiers.store import PageStore, Parts

logger = logging.getLogger("sglang.mimo_plugin")

_KINDS = {PoolName.KV.value: "full", PoolName.SWA.value: "swa"}
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
        with start_up():
            self.store: PageStore = open_store(storage_config.extra_config or {})
        hooks.install()
        self.registered_pools: dict[str, Any] = {}
        self._spaces: dict[str, str] = {}
        self.keeper = KeepAlive(self._touch)
        self.accounting = TierAccounting(self._make_sink if _speaks(storage_config) else None)

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
        with start_up():
            for name in {str(PoolName.KV), *self.registered_pools}:
                self._try(name)
        logger.info("mimo storage: pools %s in %s", ", ".join(self._spaces), self.store)
        started()

    def _try(self, name: str) -> None:
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
        found = self._leading(keys)
        self._looked_up(keys, found, found)
        return found

    def _leading(self, keys: list[str]) -> int:
        return leading(self.store.exists(self._keys(PoolName.KV.value, keys)))

    def _looked_up(self, keys: list[str], full_pages: int, hit_pages: int) -> None:
        tokens = self._pool(PoolName.KV.value).page_size
        self.accounting.looked_up(len(keys) * tokens, full_pages * tokens, hit_pages * tokens)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How long a prefix can be restored from all pools together."""
        kv_pages = self._leading(keys)
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
        self._looked_up(keys, kv_pages, ends[-1] if ends else 0)
        return PoolTransferResult(ends[-1] if ends else 0, hits, ends)

    def exists(self, key: str) -> bool:
        """Whether one page of full-attention KV is there."""
        return self._leading([key]) == 1

    def cut(self, tokens: int) -> None:
        """Of a hit, host memory had no room for ``tokens``."""
        self.accounting.cut(tokens)

    def keep_alive(self, cache: Any, node: Any) -> None:
        """A higher tier answers with the prefix that ends in a node of the tree: touch its pages.

        Args:
            cache: SGLang's radix cache.
            node: where the prefix ends.
        """
        last = cache.tree_core.get_last_hash_value(node)
        if not last or not self.keeper.due(last):
            return
        whole = {PoolName.KV.value} | {
            spec.pool_name.value
            for spec in cache.sidecar_pool_specs
            if spec.indices_from_pool == PoolName.KV
        }
        ends = [name for name in self.registered_pools if name not in whole]
        window_pages = -(-(cache.sliding_window_size or 1) // cache.page_size)
        hashes = prefix_hashes(cache.tree_core, node)
        self.keeper.add(pages_of(hashes, sorted(whole), ends, window_pages))

    def _touch(self, pages: Mapping[str, Sequence[str]]) -> None:
        for name, hashes in pages.items():
            self.store.touch(self._keys(name, hashes))

    # -- transfers -----------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages of full-attention KV into the host pool."""
        return self._move("read", PoolName.KV.value, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Write pages of full-attention KV from the host pool."""
        return self._move("written", PoolName.KV.value, keys, host_indices)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of other pools."""
        return {t.name: self._transfer("read", t) for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Write pages of other pools."""
        return {t.name: self._transfer("written", t) for t in transfers}

    def _transfer(self, direction: str, transfer: Any) -> list[bool]:
        name = transfer.name.value
        return self._move(direction, name, transfer.keys or [], transfer.host_indices)

    def _move(
        self, direction: str, name: str, hashes: Sequence[str], host_indices: torch.Tensor | None
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
        pages = self._pages(pool, host_indices)
        move = self.store.get if direction == "read" else self.store.put
        done = move(self._keys(name, hashes), pages)
        sizes = (sum(part.nbytes for part in page) for page in pages)
        moved = sum(size for size, well in zip(sizes, done, strict=True) if well)
        self.accounting.moved(direction, _KINDS.get(name, "other"), moved)
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

    def get_stats(self) -> None:
        """SGLang asks once a step where metrics are on; the plugin's go out here."""
        self.accounting.flush(self.store.stats)

    def _make_sink(self) -> PrometheusSink:
        return make_sink(str(self.config.model_name))

    def close(self) -> None:
        """Let go of the store."""
        self.keeper.close()
        self.store.close()


def _speaks(config: Any) -> bool:
    """The ranks of one attention group look up the same; the first speaks for all."""
    return all(rank == 0 for rank in (config.tp_rank, config.pp_rank, config.attn_cp_rank))


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
