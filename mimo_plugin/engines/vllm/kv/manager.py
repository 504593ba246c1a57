# SPDX-License-Identifier: Apache-2.0
"""The KV cache manager that the scheduler sees: stock, plus memoised look-ups and accounting."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

from mimo_plugin.engines.vllm.kv.accounting import Accounting
from mimo_plugin.engines.vllm.kv.coordinator import MimoCoordinator
from mimo_plugin.engines.vllm.kv.lookup import Lookup, remember


class MimoKVCacheManager(KVCacheManager):  # type: ignore[misc]
    """``KVCacheManager`` over a :class:`MimoCoordinator`. Built by ``bind.py``."""

    coordinator: MimoCoordinator
    memoise = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lookups: dict[str, Lookup] = {}
        self.accounting = Accounting(self.coordinator)

    def get_computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int]:
        """As upstream ``(blocks, hit tokens, junction)``, remembered while the request waits."""
        if not self.prefix_cache_lookup_enabled(request):
            result: tuple[Any, int, int] = super().get_computed_blocks(request)
            return result
        limit = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        memo = self._lookups.get(request.request_id) if self.memoise else None
        if memo is not None and memo.still_valid(request, limit, self.coordinator):
            self.accounting.looked_up(memo=True)
            return memo.result
        if max_cache_hit_length is None:
            result = super().get_computed_blocks(request)
        else:
            result = super().get_computed_blocks(request, max_cache_hit_length)
        self.accounting.looked_up(memo=False)
        memo, lists = remember(request, result, limit, self.coordinator)
        if lists is not None:
            result = memo.result = (self.create_kv_cache_blocks(lists), *result[1:])
        self._lookups[request.request_id] = memo
        return result

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream; before a running request is refused, held windows are given up."""
        blocks = super().allocate_slots(request, *args, **kwargs)
        if blocks is None and request.status == RequestStatus.RUNNING:
            # Its own hold first, then those of the requests admitted last, as few as it takes.
            others = [r for r in reversed(self.coordinator.states) if r != request.request_id]
            for request_id in (request.request_id, *others):
                if self.coordinator.release_hold(request_id):
                    blocks = super().allocate_slots(request, *args, **kwargs)
                    if blocks is not None:
                        break
        return blocks

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """As upstream, and account for what the hit could have been. Called at admission."""
        super().record_prefix_cache_stats(request, num_hits)
        memo = self._lookups.pop(request.request_id, None)
        if memo is not None:
            self.accounting.admitted(request, num_hits, memo.full_tokens)

    def used_by_waiting(self, request: Any) -> None:
        """A request that waits will want its hit: what it ends in counts as used now."""
        self.get_computed_blocks(request)
        memo = self._lookups.get(request.request_id)
        if memo is not None and memo.node is not None and not memo.node.dead:
            self.coordinator.order.used(memo.node)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """As upstream; a connector calls it for blocks whose content can't be trusted."""
        self.coordinator.distrust()
        super().evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """As upstream; look-ups of waiting requests are forgotten too."""
        self._lookups.clear()
        done: bool = super().reset_prefix_cache()
        return done

    def free(self, request: Any) -> None:
        """As upstream, after the end of the turn is checkpointed."""
        self._finish(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """As upstream, after the end of the turn is checkpointed."""
        self._finish(request)
        blocks: list[Any] = super().pop_blocks_for_free(request)
        return blocks

    def _finish(self, request: Any) -> None:
        self._lookups.pop(request.request_id, None)
        self.coordinator.finish(request)
