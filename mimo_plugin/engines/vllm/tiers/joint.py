# SPDX-License-Identifier: Apache-2.0
"""Blocks that the device still has are taken over by a request whose hit comes from lower tiers.

vLLM allocates blocks for everything beyond the joint hit of the device and has it loaded, although
of one group the device may have it all. Here such blocks are handed to ``allocate_slots`` as hits
of their group, which references them before anything is allocated, so that none can die for it.
What lies between them stays empty at first, and gets blocks of its own right after; only these are
loaded.

Both hooks are set on the cache manager of one engine by the connector it is bound to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_offload.base import get_offload_block_hash


@dataclass(slots=True)
class Adoption:
    """What a request takes over.

    Attributes:
        local_tokens: hit of the device alone.
        tokens: hit that it becomes, aligned to every group's blocks.
        keys: per group the keys of the blocks, by block index.
    """

    local_tokens: int
    tokens: int
    keys: tuple[Mapping[int, bytes], ...]


class DeviceBlocks:
    """The device's cached blocks, and who takes them over.

    Args:
        manager: vLLM's KV cache manager.
        group_ids: KV cache group of each of the connector's groups.
    """

    def __init__(self, manager: Any, group_ids: tuple[int, ...]) -> None:
        self.manager = manager
        self.group_ids = group_ids
        self._pool = manager.block_pool
        self._plans: dict[str, Adoption] = {}
        #: request to its fresh blocks that have no hash yet, by group
        self._fresh: dict[str, dict[int, list[int]]] = {}
        #: the plugin's own coordinator hashes by its tree, which takes over what is resident
        self.by_tree = hasattr(manager.coordinator, "order")
        self._allocate: Callable[..., Any] = manager.allocate_slots
        self._cache: Callable[..., Any] = manager.cache_blocks
        manager.allocate_slots = self.allocate_slots
        manager.cache_blocks = self.cache_blocks

    def find(self, group: int, key: bytes) -> Any | None:
        """The device's cached block of an offload key, None if there is none."""
        name = make_block_hash_with_group_id(get_offload_block_hash(key), self.group_ids[group])
        return self._pool.cached_block_hash_to_block.get_one_block(name)

    def plan(self, request_id: str, adoption: Adoption | None) -> None:
        """What the request takes over when it is next given blocks; None: nothing."""
        if adoption is None or not any(adoption.keys):
            self._plans.pop(request_id, None)
        else:
            self._plans[request_id] = adoption

    def forget(self, request_id: str) -> None:
        """The request is over; what it was loading when it ended is nobody's."""
        self._plans.pop(request_id, None)
        self._fresh.pop(request_id, None)

    # -- hooks ---------------------------------------------------------------------------------

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream; a planned adoption comes true, or the request has to wait."""
        plan = self._plans.pop(request.request_id, None)
        self._fresh.pop(request.request_id, None)  # of an admission that came to nothing
        external = kwargs.get("num_external_computed_tokens", 0)
        if plan is None or external != plan.tokens - plan.local_tokens:
            return self._allocate(request, *args, **kwargs)
        lists = self._lists(plan, kwargs["new_computed_blocks"].blocks)
        if lists is None:
            return None  # one of them died since: asked again in the next step
        holes = [
            (group_id, index)
            for group_id, blocks in enumerate(lists)
            for index in range(self._window_start(group_id, plan.tokens), len(blocks))
            if blocks[index].is_null
        ]
        kwargs["new_computed_blocks"] = self.manager.create_kv_cache_blocks(lists)
        kwargs["reserved_blocks"] = kwargs.get("reserved_blocks", 0) + len(holes)
        allocated = self._allocate(request, *args, **kwargs)
        if allocated is not None:
            self._fill(request, plan, lists, holes)
        return allocated

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """As upstream, after blocks that were loaded into holes got their hashes."""
        for group_id, indices in self._fresh.pop(request.request_id, {}).items():
            manager = self.manager.coordinator.single_type_managers[group_id]
            for index in indices:
                if (index + 1) * manager.block_size <= num_computed_tokens:
                    self._pool.cache_full_blocks(
                        request=request,
                        blocks=manager.req_to_blocks[request.request_id],
                        num_cached_blocks=index,
                        num_full_blocks=index + 1,
                        block_size=manager.block_size,
                        kv_cache_group_id=group_id,
                    )
        self._cache(request, num_computed_tokens)

    # -- steps ---------------------------------------------------------------------------------

    def _lists(self, plan: Adoption, local: Any) -> tuple[list[Any], ...] | None:
        """The blocks of each KV cache group with what is taken over; None if some is gone."""
        lists = [list(blocks) for blocks in local]
        for group, keys in enumerate(plan.keys):
            blocks = lists[self.group_ids[group]]
            for index in sorted(keys):
                if index < len(blocks) and not blocks[index].is_null:
                    continue
                block = self.find(group, keys[index])
                if block is None:
                    return None
                blocks.extend([self._pool.null_block] * (index + 1 - len(blocks)))
                blocks[index] = block
        return tuple(lists)

    def _window_start(self, group_id: int, tokens: int) -> int:
        manager = self.manager.coordinator.single_type_managers[group_id]
        return int(manager.get_num_skipped_tokens(tokens) // manager.block_size)

    def _fill(
        self,
        request: Any,
        plan: Adoption,
        lists: tuple[list[Any], ...],
        holes: list[tuple[int, int]],
    ) -> None:
        """Give the holes blocks, and set from where on the groups hash what was loaded."""
        managers = self.manager.coordinator.single_type_managers
        request_id = request.request_id
        fresh: dict[int, list[int]] = {}
        for (group_id, index), block in zip(
            holes, self._pool.get_new_blocks(len(holes)), strict=True
        ):
            managers[group_id].req_to_blocks[request_id][index] = block
            fresh.setdefault(group_id, []).append(index)
        if self.by_tree:
            for group_id, blocks in enumerate(lists):
                if blocks:
                    first = plan.local_tokens // managers[group_id].block_size
                    managers[group_id].num_cached_block[request_id] = first
        elif fresh:
            self._fresh[request_id] = fresh
