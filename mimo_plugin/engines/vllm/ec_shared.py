# SPDX-License-Identifier: Apache-2.0
"""vLLM's encoder-cache connector over the shared-memory cache of the node.

Every instance of a node that is started with this connector, and whose encoder makes the same
embeddings, stores what it makes and takes what another one made. The switch fills in the module::

    --ec-transfer-config '{"ec_connector": "MimoSharedECConnector", "ec_role": "ec_both",
        "ec_connector_extra_config": {"capacity_mib": 2048}}'

vLLM asks its scheduler whether an item is cached, and its worker to load it later. In between, the
scheduler holds the entry, so that it can't be evicted: the worker reports what it loaded and the
scheduler lets go. A hit needs the key and the number of embeddings that the request expects; the
expectation comes with the request, before vLLM asks by identifier alone.

The name of the cache says which encoder and pixels embeddings are of
(:mod:`~mimo_plugin.engines.vllm.ec_key`); the identifiers that vLLM gives say of which content.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

from mimo_plugin.engines.vllm.ec_key import cache_name
from mimo_plugin.engines.vllm.ec_stats import (
    EncoderCacheProm,
    EncoderCacheStats,
    SchedulerReport,
    WorkerCounts,
    added,
)
from mimo_plugin.errors import setting_error
from mimo_plugin.media.shared import SharedCache

DEFAULT_CAPACITY_MIB = 1024
DEFAULT_MAX_ENTRIES = 4096
_SETTINGS = ("capacity_mib", "max_entries", "name")


@dataclass
class LoadPlan(ECConnectorMetadata):  # type: ignore[misc]
    """Scheduler to worker: what to load in this step, identifier to number of embeddings."""

    lengths: dict[str, int] = field(default_factory=dict)


@dataclass
class Loaded(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler: identifiers that are in vLLM's encoder cache now, and counters."""

    identifiers: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> Loaded:
        """What all workers have; an item that one lacks must stay held."""
        return Loaded(self.identifiers & other.identifiers, added(self.counts, other.counts))


class MimoSharedECConnector(ECConnectorBase):  # type: ignore[misc]
    """One per scheduler and one per worker; they meet in the cache.

    Raises:
        ConfigError: a setting in ``ec_connector_extra_config`` is unknown or out of range.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._cache = open_cache(vllm_config)
        # scheduler
        self._report = SchedulerReport(self._cache)
        self._expected: dict[str, int] = {}
        self._holds: dict[str, contextlib.ExitStack] = {}
        self._plan: dict[str, int] = {}
        self._in_flight: set[str] = set()
        # worker
        self._loaded: set[str] = set()
        self._counts = WorkerCounts(self._cache.counts)

    # -- scheduler -----------------------------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Note how many embeddings each item of the request needs; nothing has to be waited for."""
        for index, feature in enumerate(request.mm_features):
            self._expected[feature.identifier] = request.get_num_encoder_embeds(index)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item can be loaded; from then on it is held."""
        if not self.is_consumer:
            return False
        if identifier in self._holds:
            return True
        expected = self._expected.get(identifier)
        if expected is None:
            return False
        stack = contextlib.ExitStack()
        if stack.enter_context(self._cache.hold(identifier, expected, count=False)) is None:
            stack.close()
            return False
        self._holds[identifier] = stack
        return True

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The item has room in vLLM's encoder cache: plan its load if it is held."""
        identifier = request.mm_features[index].identifier
        if identifier in self._holds:
            self._plan[identifier] = request.get_num_encoder_embeds(index)
            self._report.looked_up("hit")
        elif self.is_consumer:
            other = self._cache.contains(identifier)
            self._report.looked_up("mismatch" if other else "miss")

    def build_connector_meta(self, scheduler_output: Any) -> LoadPlan:
        """The loads of this step; what was asked about and not scheduled is let go."""
        plan, self._plan = LoadPlan(self._plan), {}
        for identifier in self._holds.keys() - plan.lengths.keys() - self._in_flight:
            self._holds.pop(identifier).close()
        self._in_flight |= plan.lengths.keys()
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        """Let go of what the workers have loaded."""
        report = connector_output.ec_connector_worker_meta
        if isinstance(report, Loaded):
            self._report.worked(report.counts)
            for identifier in report.identifiers & self._holds.keys():
                self._in_flight.discard(identifier)
                self._holds.pop(identifier).close()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget what the request expected."""
        for feature in request.mm_features:
            self._expected.pop(feature.identifier, None)
        return False, None

    # -- worker --------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Copy the planned items into vLLM's encoder cache.

        Raises:
            RuntimeError: an item that the scheduler holds is gone.
        """
        plan = self._get_connector_metadata()
        for identifier, length in plan.lengths.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = self._load(identifier, length)
            self._loaded.add(identifier)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Store what the encoder has just made."""
        if self.is_producer:
            store(self._cache, mm_hash, encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> Loaded | None:
        """What was loaded and counted since the last report."""
        loaded, self._loaded = self._loaded, set()
        counts = self._counts.drain()
        return Loaded(loaded, counts) if loaded or counts else None

    # -- both ----------------------------------------------------------------------------------

    def get_ec_connector_stats(self) -> EncoderCacheStats | None:
        """Counters since the last call, the workers' among them; a worker itself has none."""
        return self._report.drain()

    @classmethod
    def build_ec_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> EncoderCacheStats | None:
        """What ``get_ec_connector_stats`` gave, in the API process."""
        return EncoderCacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EncoderCacheProm:
        """The metrics of the cache in the API process."""
        return EncoderCacheProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Let go of everything and leave the cache."""
        for stack in self._holds.values():
            stack.close()
        self._holds.clear()
        self._cache.close()

    def _load(self, identifier: str, length: int) -> torch.Tensor:
        from vllm.platforms import current_platform

        with self._cache.hold(identifier, length) as found:
            if found is None:
                raise RuntimeError(
                    f"encoder cache: found no entry of {length} embeddings for {identifier}; "
                    "allowed: one that the scheduler holds"
                )
            host = torch.from_numpy(found.data.copy()).view(getattr(torch, found.dtype))
            return host.view(found.shape).to(current_platform.device_type)


def store(cache: SharedCache, identifier: str, embedding: torch.Tensor) -> bool:
    """Put one embedding, [tokens, ...] of any dtype; whether it is in the cache now."""
    host = embedding.detach().cpu().contiguous()
    data = host.view(-1).view(torch.uint8).numpy()
    return cache.put(identifier, data, host.shape, str(host.dtype).removeprefix("torch."))


def open_cache(vllm_config: Any) -> SharedCache:
    """The node's cache for this checkpoint.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    extra = dict(vllm_config.ec_transfer_config.ec_connector_extra_config)
    for setting in extra.keys() - set(_SETTINGS):
        raise setting_error(
            f"ec_connector_extra_config.{setting}",
            extra[setting],
            f"one of {', '.join(_SETTINGS)}",
            "remove it",
        )
    for setting in ("capacity_mib", "max_entries"):
        value = extra.get(setting, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise setting_error(
                f"ec_connector_extra_config.{setting}", value, "a whole number above 0", "change it"
            )
    return SharedCache(
        cache_name(vllm_config, str(extra.get("name", ""))),
        capacity_bytes=extra.get("capacity_mib", DEFAULT_CAPACITY_MIB) << 20,
        max_entries=extra.get("max_entries", DEFAULT_MAX_ENTRIES),
    )
