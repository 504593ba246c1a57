# SPDX-License-Identifier: Apache-2.0
"""Which engines may share embeddings: those whose encoder makes the same ones of the same media.

vLLM's identifier of an item covers its bytes, the model's name and the processor settings of the
request. It does not say how pixels were made of the bytes, nor by which encoder. All of that is in
the name of the shared cache, so that engines that differ in any of it never meet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mimo_plugin import __version__
from mimo_plugin.config import SECTION, section_of
from mimo_plugin.engines.vllm.media_pool import TOKEN_KEY
from mimo_plugin.engines.vllm.version import installed_vllm
from mimo_plugin.engines.vllm.vision.names import SETUP_KEY
from mimo_plugin.media.keys import content_key

_FEATURES = ("vision", "video")
"""Features of ours that decide what the encoder gets to see."""

_SAME_PIXELS = ("decode", "encoder_cache_")
"""Settings that begin so say where pixels are made, or how many are kept, not which."""


def cache_name(vllm_config: Any, name: str) -> str:
    """File name of the cache that this engine may use.

    Args:
        vllm_config: of the engine, as its processes have it.
        name: the user's own; engines with different ones share nothing.
    """
    model = vllm_config.model_config
    key = content_key(
        "embedding-cache",
        b"",
        mode=str(model.dtype),
        size=(),
        settings={"name": name, **_encoder(vllm_config), **_pixels(vllm_config)},
    )
    return f"mimo-ec-{key}"


def _encoder(vllm_config: Any) -> dict[str, str]:
    """What the encoder is."""
    model = vllm_config.model_config
    return {
        "engine": installed_vllm().version,
        "plugin": __version__,
        "model": str(model.model),
        "revision": str(model.revision),
        "overrides": _text(model.hf_overrides),
        "quantization": str(model.quantization),
        "load_format": str(vllm_config.load_config.load_format),
        "device": str(vllm_config.device_config.device_type),
    }


def _pixels(vllm_config: Any) -> dict[str, str]:
    """How pixels are made of the bytes of an item."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:  # a model without media asks for nothing
        return {}
    loading = {k: v for k, v in (multimodal.media_io_kwargs or {}).items() if k != TOKEN_KEY}
    section = section_of(vllm_config.additional_config)
    settings = section if isinstance(section, Mapping) else {}
    features = settings.get("features", ())
    ours: dict[str, Any] = {
        feature: {
            key: value
            for key, value in settings.get(feature, {}).items()
            if not key.startswith(_SAME_PIXELS)
        }
        for feature in _FEATURES
        if feature in features
    }
    rule = getattr(vllm_config.model_config.hf_config, SETUP_KEY, None)
    if "vision" in ours and rule is not None:  # the checkpoint's pixel rule, as it was resolved
        ours["rule"] = {k: v for k, v in rule.items() if k not in ("config", "engine_token")}
    return {
        SECTION: _text(ours),
        "media_io_kwargs": _text(loading),
        "mm_processor_kwargs": _text(multimodal.mm_processor_kwargs or {}),
    }


def _text(value: Any) -> str:
    """The same in every process: no addresses of objects, no order of keys."""
    return json.dumps(value, sort_keys=True, default=_named)


def _named(value: Any) -> str:
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    return str(value)
