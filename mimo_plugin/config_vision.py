# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``vision``."""

from __future__ import annotations

from dataclasses import dataclass

from mimo_plugin.config_values import (
    Validator,
    boolean,
    number,
    one_of,
    section,
    whole,
    whole_or_none,
)

PIXEL_BACKENDS = ("auto", "triton", "cpu", "reference")
MEAN_STD_SOURCES = ("checkpoint", "stock")
TIMESTAMP_SOURCES = ("frames", "stock")
OUTER_TOKENS = ("remove", "stock")
PROCESSOR_KWARGS = ("honour", "stock")
CACHE_LIMIT = "limit"
DECODERS = ("auto", "pool", "stock")


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Settings of the feature ``vision``.

    Attributes:
        backend: what makes patch rows, one of ``PIXEL_BACKENDS``; ``auto`` takes the fastest that
            runs on the model's device and says which; any other never gives way.
        mean_std: mean and standard deviation of pixels: those of the checkpoint's
            ``preprocessor_config.json``, or (``stock``) ImageNet's, which vLLM has built in.
        timestamps: times in the prompt of a video: those of its frames, or (``stock``) one second
            a frame from 0, whatever the video.
        outer_tokens: the vision start and end token that the chat template puts around a video,
            which has tokens of its own there: ``remove`` or (``stock``) leave them.
        processor_kwargs: ``honour`` ``min_pixels``, ``max_pixels``, ``total_max_pixels`` and
            ``size`` in ``mm_processor_kwargs`` and refuse what is unknown, or (``stock``) ignore
            all of them.
        once: stills are written once instead of for every frame of a patch, and the weights of the
            patch embedding are added up to match; sums round in another order.
        host_resize_ratio: pixels of a source over those of its target above which the API process
            resizes, >= 0; below, the model's process does.
        encoder_cache_tokens: embeddings that the engine's encoder cache holds, >= 1; ``limit``:
            room for all media of any one prompt; None: vLLM's size, which has room for one of the
            largest.
        decode: where pictures are decoded: in a ``pool`` of processes, or (``stock``) in threads of
            the API process; ``auto`` is the pool unless ``VLLM_MEDIA_CONNECTOR`` names a connector.
        decode_workers: processes for pictures, in each API process; None takes one a core, up to 8.
        decode_queue: pictures that wait for a worker, >= 1; further requests wait for a place.
        decode_wait_s: longest wait for a place, and for memory, in seconds, > 0.
        decode_timeout_s: longest time to decode one picture in seconds, > 0.
        decode_memory_mib: memory of decoded pictures that wait to be packed, >= 1.
        decode_max_expansion: decoded bytes per encoded byte from which a picture of more than 64
            MiB is refused, >= 1; None sets no limit, as in stock.
    """

    backend: str = "auto"
    mean_std: str = "checkpoint"
    timestamps: str = "frames"
    outer_tokens: str = "remove"
    processor_kwargs: str = "honour"
    once: bool = False
    host_resize_ratio: float = 4.0
    encoder_cache_tokens: int | str | None = None
    decode: str = "auto"
    decode_workers: int | None = None
    decode_queue: int = 64
    decode_wait_s: float = 30.0
    decode_timeout_s: float = 30.0
    decode_memory_mib: int = 4096
    decode_max_expansion: int | None = None


def _cache_tokens(setting: str, value: object) -> int | str | None:
    """A size in embeddings, ``limit`` or None."""
    if value == CACHE_LIMIT:
        return CACHE_LIMIT
    null = f'"{CACHE_LIMIT}" for room for every prompt, null for vLLM\'s size'
    found: int | None = whole_or_none(1, "embeddings", null)(setting, value)
    return found


_VALUES: dict[str, Validator] = {
    "backend": one_of(PIXEL_BACKENDS),
    "mean_std": one_of(MEAN_STD_SOURCES),
    "timestamps": one_of(TIMESTAMP_SOURCES),
    "outer_tokens": one_of(OUTER_TOKENS),
    "processor_kwargs": one_of(PROCESSOR_KWARGS),
    "once": boolean,
    "host_resize_ratio": number(least=0),
    "encoder_cache_tokens": _cache_tokens,
    "decode": one_of(DECODERS),
    "decode_workers": whole_or_none(1, "processes", "null takes one a core, up to 8"),
    "decode_queue": whole(1, "pictures"),
    "decode_wait_s": number(over=0),
    "decode_timeout_s": number(over=0),
    "decode_memory_mib": whole(1, "MiB"),
    "decode_max_expansion": whole_or_none(1, "bytes per byte", "null sets no limit"),
}


def parse_vision(where: str, raw: object) -> VisionConfig:
    """The settings of the section ``where``.

    Raises:
        ConfigError: unknown key, wrong type, value out of range.
    """
    return VisionConfig(**section(where, raw, _VALUES))
