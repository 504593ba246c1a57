# SPDX-License-Identifier: Apache-2.0
"""KV of the MTP layers that comes from another engine or goes to one.

Two things can be wrong with it. Sender and receiver may not have the same layers; and the last rows
rest on tokens that the sender only guessed (``core/handover.py`` says which). Connectors of vLLM
that hand a request over know nothing of the second (Mooncake), or have the sender stop k-1 tokens
early and leave the k rows before that as they are (NIXL). Telling the scheduler of fewer tokens
than the connector will write is not allowed: blocks are paired from the end, so all would be
shifted. So the load is taken whole, and the request goes on a few tokens before its end.

Connectors that store blocks under a hash of their tokens give out a block of a draft group only
when the next block matches too, so a reader goes on a block before the end; what remains is to
store no block before its rows are final.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from mimo_plugin.core.handover import LoadedGroup, resume_at
from mimo_plugin.engines.vllm.register import LOGGER_NAME, config_from

logger = logging.getLogger(LOGGER_NAME)

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
HAND_OVER = (*NIXL, "MooncakeConnector")
"""Connectors that bring a request's KV from the engine that computed it."""
OFFLOADING = "OffloadingConnector"
STORES = (OFFLOADING, "SimpleCPUOffloadConnector")
"""Connectors that keep blocks under a hash of their tokens, none before its rows are final. (The
Mooncake store keeps a prompt's last block at once, and its keys tell no number of layers.)"""
BENCHMARK = "DecodeBenchConnector"
"""Brings no KV of any request, only numbers of tokens."""
MULTI = "MultiConnector"


def connectors(transfer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and extra configuration of each connector, those inside a ``MultiConnector`` singly.

    Args:
        transfer: a ``KVTransferConfig``, or its fields as a mapping; None yields nothing.
    """
    if transfer is None:
        return
    get = transfer.get if isinstance(transfer, Mapping) else _fields(transfer)
    name, extra = get("kv_connector"), get("kv_connector_extra_config")
    if name is None:
        return
    if name != MULTI:
        yield name, {} if extra is None else extra
        return
    for child in (extra or {}).get("connectors", ()):
        yield from connectors(child)


def _fields(holder: Any) -> Any:
    """``holder``'s fields by name, None for those that it doesn't have."""
    return lambda name: getattr(holder, name, None)


def why_transfer_unsafe(vllm_config: Any) -> str | None:
    """Reason, with its fix, why KV of MTP layers can't pass this engine's connector; None: it can.

    With one draft token there is one layer, whose last row alone rests on a guess: nothing to ask.
    """
    if vllm_config.num_speculative_tokens <= 1:
        return None
    known = (*HAND_OVER, *STORES, BENCHMARK)
    for name, _ in connectors(vllm_config.kv_transfer_config):
        if name not in known:
            return (
                f"KV connector {name} is not known to keep the KV of several MTP layers exact; "
                f"needed: one of {', '.join(known)} (or {MULTI} over these); fix: use one of "
                "these, set num_speculative_tokens to 1, or drop --kv-transfer-config"
            )
    return None


def prepare_worker(vllm_config: Any) -> None:
    """Make NIXL's handshake of this process refuse a peer with another number of MTP layers."""
    if not any(name in NIXL for name, _ in connectors(vllm_config.kv_transfer_config)):
        return
    if (layers := mtp_layers(vllm_config)) is not None:
        logger.info("mimo-plugin: every NIXL peer must run %d MTP layers", layers)
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    stock = metadata._get_speculative_compatibility_factors
    if hasattr(stock, "mimo_stock"):
        return

    def factors(config: Any) -> dict[str, Any] | None:
        found: dict[str, Any] | None = stock(config)
        layers = mtp_layers(config)
        if layers is None or layers < 2:  # one layer, as vLLM has it
            return found
        return {**(found or {}), "mimo_mtp_layers": layers}

    factors.mimo_stock = stock  # type: ignore[attr-defined]
    metadata._get_speculative_compatibility_factors = factors


def mtp_layers(vllm_config: Any) -> int | None:
    """MTP layers that this engine runs, None where the feature is off."""
    config = config_from(vllm_config, environ={})
    if config is None or "mtp" not in config.features:
        return None
    layers: int = vllm_config.num_speculative_tokens
    return layers


@lru_cache(maxsize=8)
def extended(base: Any) -> Any:
    """``base`` (``Scheduler``, ``AsyncScheduler`` or a user's own) with the feature's method."""
    if hasattr(base, "handover_layers"):
        return base

    class HandoverScheduler(base):  # type: ignore[misc]
        """``base`` that computes again what a sender had to guess; inert until ``guard``."""

        #: MTP layers k, 0 while inert
        handover_layers = 0
        #: requests whose KV was loaded, tokens of theirs that are computed again, and loads that
        #: left rows as they came, because their windows don't reach further back
        handover_loads = handover_repeated_tokens = handover_incomplete = 0

        def _update_waiting_for_remote_kv(self, request: Any) -> None:
            """As upstream, after the request's computed tokens end where its rows are exact."""
            if self.handover_layers and request.request_id not in self.failed_recving_kv_req_ids:
                end = request.num_computed_tokens
                start = _resume(self, request.request_id, end)
                request.num_computed_tokens = start
                incomplete = start > max(0, end - self.handover_layers)
                # vLLM itself computes the last token of a prompt again.
                repeated = max(0, min(end, request.num_tokens - 1) - start)
                self.handover_loads += 1
                self.handover_incomplete += incomplete
                self.handover_repeated_tokens += repeated
                if (drafts := getattr(self, "draft_control", None)) is not None:
                    drafts.report.handed_over(repeated, incomplete)
            super()._update_waiting_for_remote_kv(request)

    HandoverScheduler.__name__ = HandoverScheduler.__qualname__ = f"Handover{base.__name__}"
    return HandoverScheduler


def guard(scheduler: Any, layers: int) -> None:
    """Make ``scheduler`` keep the KV of ``layers`` MTP layers exact across its connector.

    Args:
        scheduler: an instance of an ``extended`` class, or of any class derived from vLLM's
            ``Scheduler`` (it then becomes an instance of the extended class).
        layers: MTP layers k; fewer than 2 change nothing.
    """
    if scheduler.connector is None or layers < 2:
        return
    for connector in _leaves(scheduler.connector):
        name = type(connector).__name__
        if name == OFFLOADING:
            _store_final_rows(connector.connector_scheduler, layers)
        elif name in HAND_OVER:
            if not hasattr(scheduler, "handover_layers"):
                scheduler.__class__ = extended(scheduler.__class__)
            scheduler.handover_layers = layers


def _leaves(connector: Any) -> Iterator[Any]:
    children = getattr(connector, "sub_connectors", None)
    if children is None:
        yield connector
        return
    for child in children:
        yield from _leaves(child)


def _store_final_rows(offloading: Any, layers: int) -> None:
    """Hold a block back until the tokens after it that its rows rest on are known."""
    stock = offloading._calc_num_offloadable_tokens
    stock = getattr(stock, "mimo_stock", stock)

    def calc(req_status: Any, num_computed_tokens: int) -> int:
        tokens: int = stock(req_status, num_computed_tokens)
        return max(0, tokens - (layers - 1))

    calc.mimo_stock = stock  # type: ignore[attr-defined]
    offloading._calc_num_offloadable_tokens = calc


def _resume(scheduler: Any, request_id: str, end_tokens: int) -> int:
    """Where a request goes on whose load ends at ``end_tokens``."""
    groups, local_tokens = [], None
    manager = scheduler.kv_cache_manager
    config = manager.kv_cache_config
    for group, blocks in zip(
        config.kv_cache_groups, manager.get_blocks(request_id).blocks, strict=True
    ):
        spec = _layer_spec(group.kv_cache_spec)
        window = getattr(spec, "sliding_window", None)
        if window is None:
            groups.append(LoadedGroup(spec.block_size))
            # Blocks that this engine had are in the prefix cache; those of a load not yet.
            cached = next((i for i, b in enumerate(blocks) if b.block_hash is None), len(blocks))
            own = cached * spec.block_size
            local_tokens = own if local_tokens is None else min(local_tokens, own)
            continue
        present = next((i for i, b in enumerate(blocks) if not b.is_null), len(blocks))
        # A sender's list ends with as many blocks as a window may touch.
        sent = -(-end_tokens // spec.block_size) - (-(-window // spec.block_size) + 1)
        groups.append(LoadedGroup(spec.block_size, max(present, sent, 0), window))
    return resume_at(end_tokens, scheduler.handover_layers, groups, local_tokens=local_tokens or 0)


def _layer_spec(spec: Any) -> Any:
    """The spec of a group's layers, where the group only bundles them."""
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec
