# SPDX-License-Identifier: Apache-2.0
"""vLLM symbols that feature video relies on, beside those of feature vision, which it needs."""

from __future__ import annotations

from functools import partial

from mimo_plugin.contracts.row import Contract, call, class_, replaced

_VIDEO = ("video",)
_call = partial(call, features=_VIDEO)
_class = partial(class_, features=_VIDEO)
_name = partial(replaced, features=_VIDEO)

_LOADERS = "multimodal.video"
_IO = "multimodal.media.video"

VIDEO_ROWS: tuple[Contract, ...] = (
    _name(_LOADERS, "VIDEO_LOADER_REGISTRY", "makes the loader known"),
    _call(
        _LOADERS,
        "VideoLoaderRegistry.register",
        "makes the loader known",
        first="name",
    ),
    _class(_LOADERS, "VideoLoader", "base of the loader", has="load_bytes"),
    _call(
        _LOADERS,
        "VideoLoader.load_bytes",
        "the loader takes the file and every option",
        first="data",
    ),
    _call(
        _IO,
        "VideoMediaIO.__init__",
        "gives the loader num_frames, a number of its own where nobody says one",
        first="image_io num_frames",
    ),
    _class(
        _IO,
        "VideoMediaIO",
        "options of engine and request together",
        has="load_bytes merge_kwargs",
    ),
    _class(
        "config.multimodal",
        "MultiModalConfig",
        "options of the loader for all requests",
        has="get_limit_per_prompt media_io_kwargs mm_processor_kwargs",
    ),
    _class(
        "multimodal.parse",
        "VideoProcessorItems",
        "the hash of a video covers its metadata",
        has="get_item_for_hash metadata",
    ),
    _name("exceptions", "GracefulHTTPError", "answers with HTTP 503 when the pool is full"),
)
"""Every row of feature video."""
