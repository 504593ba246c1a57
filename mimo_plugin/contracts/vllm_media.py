# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that decoding in a pool and the shared embedding cache rely on."""

from __future__ import annotations

from dataclasses import replace

from mimo_plugin.contracts.row import Contract, call, class_, replaced

MEDIA_POOL = "media pool"
ENCODER_CACHE = "encoder cache"
PARTS = (MEDIA_POOL, ENCODER_CACHE)
"""Tags of rows that no feature needs by itself: checked where the part is asked for."""

_MEDIA = "multimodal.media"
_EC = "distributed.ec_transfer.ec_connector.base"
_EC_STATS = "distributed.ec_transfer.ec_connector.metrics"

_CONNECTOR_ROWS = (
    *(
        replaced(_MEDIA, name, "the media connector that decodes in a pool")
        for name in (
            "MEDIA_CONNECTOR_REGISTRY",
            "ImageMediaIO",
            "MediaConnector",
            "MediaIO",
            "MediaWithBytes",
            "VideoMediaIO",
        )
    ),
    class_(
        "multimodal.media.connector",
        "MediaConnector",
        "downloads, and hands the bytes over",
        has="fetch_image fetch_image_async load_from_url load_from_url_async",
    ),
    call(
        "multimodal.media.connector",
        "MediaConnector.load_from_url_async",
        "videos are loaded in threads of their own",
        first="url media_io",
        accepts="fetch_timeout",
    ),
    class_(
        "multimodal.media.base",
        "MediaIO",
        "base of what keeps the bytes as they came",
        has="get_max_bytes load_base64 load_bytes load_file",
    ),
    class_(
        "utils.registry",
        "ExtensionManager",
        "holds the media connectors by name",
        has="load name2class register",
    ),
    class_(
        "config.multimodal",
        "MultiModalConfig",
        "carries an engine's token to its media connector",
        has="media_io_kwargs",
    ),
    class_(
        "config.parallel",
        "ParallelConfig",
        "API processes share the cores",
        has="_api_process_count",
    ),
    call(
        "multimodal.media.image",
        "ImageMediaIO.__init__",
        "settings of the decoder",
        first="image_mode",
    ),
    replaced("multimodal.image", "ALLOWED_IMAGE_FORMATS", "formats that are decoded"),
    replaced("exceptions", "GracefulHTTPError", "answers with HTTP 503 when the pool is full"),
)

_EC_ROWS = (
    class_(
        _EC,
        "ECConnectorBase",
        "base of the connector to the shared embedding cache",
        has="build_connector_meta build_connector_worker_meta build_ec_connector_stats "
        "build_prom_metrics ensure_cache_available get_ec_connector_stats has_cache_item "
        "request_finished save_caches start_load_caches update_connector_output "
        "update_state_after_alloc",
    ),
    class_(
        "config.ec_transfer",
        "ECTransferConfig",
        "names the connector, and says where it is found",
        has="ec_connector ec_connector_extra_config ec_connector_module_path ec_role",
    ),
    class_(
        _EC_STATS,
        "ECConnectorStats",
        "carries the counters from the scheduler to the API process",
        has="aggregate data is_empty reduce reset",
    ),
    call(
        _EC_STATS,
        "ECConnectorPromMetrics.__init__",
        "exports the counters",
        first="vllm_config metric_types labelnames per_engine_labelvalues",
    ),
    call(
        _EC_STATS,
        "ECConnectorPromMetrics.observe",
        "exports the counters",
        first="transfer_stats_data engine_idx",
        accepts="",
    ),
    class_(_EC, "ECConnectorMetadata", "what the scheduler tells the worker"),
    class_(_EC, "ECConnectorRole", "scheduler or worker", has="SCHEDULER WORKER"),
    class_(_EC, "ECConnectorWorkerMetadata", "what the worker tells the scheduler"),
    replaced("platforms", "current_platform", "the device that embeddings go to"),
)

MEDIA_ROWS: tuple[Contract, ...] = (
    *(replace(row, features=(MEDIA_POOL,)) for row in _CONNECTOR_ROWS),
    *(replace(row, features=(ENCODER_CACHE,)) for row in _EC_ROWS),
)
"""Every row of decoding and of the embedding cache."""
