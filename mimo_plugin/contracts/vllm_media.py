# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that decoding in a pool and the shared embedding cache rely on."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_, replaced

_VISION = ("vision",)
_call = partial(call, features=_VISION)
_class = partial(class_, features=_VISION)
_name = partial(replaced, features=_VISION)

_MEDIA = "multimodal.media"
_EC = "distributed.ec_transfer.ec_connector.base"

_CONNECTOR_ROWS = (
    *(
        _name(_MEDIA, name, "the media connector that decodes in a pool")
        for name in (
            "MEDIA_CONNECTOR_REGISTRY",
            "ImageMediaIO",
            "MediaConnector",
            "MediaIO",
            "MediaWithBytes",
        )
    ),
    _class(
        "multimodal.media.connector",
        "MediaConnector",
        "downloads, and hands the bytes over",
        has="fetch_image fetch_image_async load_from_url load_from_url_async",
    ),
    _class(
        "multimodal.media.base",
        "MediaIO",
        "base of what keeps the bytes as they came",
        has="load_base64 load_bytes load_file",
    ),
    _call(
        "multimodal.media.image",
        "ImageMediaIO.__init__",
        "settings of the decoder",
        first="image_mode",
    ),
    _name("multimodal.image", "ALLOWED_IMAGE_FORMATS", "formats that are decoded"),
    _name("exceptions", "GracefulHTTPError", "answers with HTTP 503 when the pool is full"),
)

_EC_ROWS = (
    _class(
        _EC,
        "ECConnectorBase",
        "base of the connector to the shared embedding cache",
        has="build_connector_meta has_cache_item request_finished save_caches start_load_caches "
        "update_state_after_alloc",
    ),
    _class(_EC, "ECConnectorMetadata", "what the scheduler tells the worker"),
    _class(_EC, "ECConnectorRole", "scheduler or worker", has="SCHEDULER WORKER"),
    _class(_EC, "ECConnectorWorkerMetadata", "what the worker tells the scheduler"),
    _name("platforms", "current_platform", "the device that embeddings go to"),
)

MEDIA_ROWS: tuple[Contract, ...] = (*_CONNECTOR_ROWS, *_EC_ROWS)
"""Every row of decoding and of the embedding cache."""
