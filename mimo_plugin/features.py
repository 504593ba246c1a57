# SPDX-License-Identifier: Apache-2.0
"""The table of features: what each one is, where it attaches and what it relies on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["available", "planned"]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One switchable feature.

    Attributes:
        name: as written in ``--plugin mimo:NAME``.
        title: what it does, in a few words.
        status: ``available`` in this version, or ``planned``.
        engines: engines the feature exists for (``vllm``, ``sglang``) in this version.
        seam: the upstream extension points it attaches to.
        contracts: upstream modules whose symbols ``contracts.py`` checks for it.
        default: True when plain ``--plugin mimo`` switches it on where it fits the model.
        replaced_by: the upstream change that would make it unnecessary.
    """

    name: str
    title: str
    status: Status
    engines: tuple[str, ...]
    seam: str
    contracts: tuple[str, ...]
    default: bool
    replaced_by: str


def _planned(name: str, title: str) -> Feature:
    return Feature(
        name=name,
        title=title,
        status="planned",
        engines=(),
        seam="",
        contracts=(),
        default=False,
        replaced_by="",
    )


_TABLE = (
    Feature(
        name="kv",
        title="hybrid KV cache manager and window-safe prefix matcher",
        status="available",
        engines=("vllm", "sglang"),
        seam=(
            "vLLM: scheduler_config.scheduler_cls (factory); "
            "SGLang: register_radix_cache_backend, radix_cache_backend"
        ),
        contracts=(
            "vllm.v1.core.sched.scheduler",
            "vllm.v1.core.kv_cache_manager",
            "vllm.v1.core.kv_cache_coordinator",
            "vllm.v1.core.single_type_kv_cache_manager",
            "vllm.v1.core.block_pool",
            "sglang.srt.mem_cache.registry",
            "sglang.srt.mem_cache.unified_radix_cache",
            "sglang.srt.mem_cache.unified_cache.components.swa",
        ),
        default=True,
        replaced_by="retention policy and eviction order selectable in vLLM's KVCacheManager",
    ),
    _planned("replay", "bounded exact replay of sliding-window state"),
    Feature(
        name="scheduler",
        title="cache-affine waiting queue with lanes for long prefills",
        status="available",
        engines=("vllm", "sglang"),
        seam=(
            "vLLM: scheduler_config.scheduler_cls (factory), Scheduler.waiting; "
            "SGLang: schedule_policy, SchedulePolicy, PrefillAdder"
        ),
        contracts=(
            "vllm.v1.core.sched.scheduler",
            "vllm.v1.core.sched.request_queue",
            "vllm.v1.core.block_pool",
            "sglang.srt.managers.schedule_policy",
            "sglang.srt.managers.scheduler",
        ),
        default=True,
        replaced_by="a registry of scheduling policies in the engines",
    ),
    Feature(
        name="mtp",
        title="multi-token prediction with one layer per draft step",
        status="available",
        engines=("vllm",),
        seam="speculative_config, ModelRegistry, Worker.init_device",
        contracts=(
            "vllm.config.speculative",
            "vllm.model_executor.models.mimo_v2_mtp",
            "vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator",
            "vllm.v1.core.sched.scheduler",
        ),
        default=True,
        replaced_by="all MTP layers of MiMo-V2 in vLLM's own draft class",
    ),
    Feature(
        name="vision",
        title="image preprocessing on the model's device",
        status="available",
        engines=("vllm", "sglang"),
        seam=(
            "vLLM: ModelRegistry, MULTIMODAL_REGISTRY.register_processor; "
            "SGLang: MiMoProcessor, EncoderPreprocessor, MMReceiverBase"
        ),
        contracts=(
            "vllm.model_executor.models.mimo_v2_omni",
            "vllm.multimodal.processing.processor",
            "vllm.multimodal.parse",
            "vllm.multimodal.inputs",
            "sglang.srt.multimodal.processors.mimo_v2",
            "sglang.srt.disaggregation.encoder.preprocessor",
            "sglang.srt.disaggregation.encoder.receiver",
        ),
        default=True,
        replaced_by="a processor for MiMo-V2 in vLLM that sends pixels as bytes",
    ),
    Feature(
        name="video",
        title="sparse video decoding",
        status="available",
        engines=("vllm",),
        seam="VIDEO_LOADER_REGISTRY, media_io_kwargs",
        contracts=("vllm.multimodal.video", "vllm.multimodal.media.video"),
        default=True,
        replaced_by="a loader in vLLM that decodes only what the wanted frames need",
    ),
    Feature(
        name="tiers",
        title="KV that outlives the engine, in a store below host memory",
        status="available",
        engines=("vllm", "sglang"),
        seam=(
            "vLLM: kv_transfer_config (OffloadingConnector, TieringOffloadingSpec), "
            "SecondaryTierFactory; SGLang: hicache_storage_backend (dynamic), HiCacheStorage"
        ),
        contracts=(
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
            "vllm.v1.kv_offload.tiering.manager",
            "vllm.v1.kv_offload.tiering.base",
            "vllm.v1.kv_offload.tiering.spec",
            "vllm.v1.core.kv_cache_manager",
            "sglang.srt.mem_cache.hicache_storage",
            "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
            "sglang.srt.mem_cache.unified_radix_cache",
        ),
        default=False,
        replaced_by="touches and window-aware look-ups in the engines' own tiers",
    ),
    Feature(
        name="dp_affinity",
        title="the turns of a chat stay on one data-parallel rank",
        status="available",
        engines=("vllm",),
        seam="DPLBAsyncMPClient.get_core_engine_for_request",
        contracts=("vllm.v1.engine.core_client", "vllm.v1.engine", "vllm.config.parallel"),
        default=True,
        replaced_by="a balancer in vLLM that keeps a session on its rank while ranks tie",
    ),
)

FEATURES: dict[str, Feature] = {feature.name: feature for feature in _TABLE}
"""Every feature by name; the order is the order of all lists shown to users."""


def available(engine: str) -> tuple[str, ...]:
    """Names of the features that this version can run on ``engine``, in table order."""
    return tuple(
        name
        for name, feature in FEATURES.items()
        if feature.status == "available" and engine in feature.engines
    )


def defaults(engine: str) -> tuple[str, ...]:
    """Names that plain ``--plugin mimo`` tries on ``engine``, in table order."""
    return tuple(name for name in available(engine) if FEATURES[name].default)
