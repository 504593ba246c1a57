# SPDX-License-Identifier: Apache-2.0
"""What the feature runs with: the checkpoint's pixel rule, its limits, and the settings.

It is resolved once, where the engine is configured, and travels in the model's configuration:
the processor of requests and the model, in other processes, read the same values.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mimo_plugin.config_vision import VisionConfig
from mimo_plugin.core.pixels import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MIMO_MAX_TOKENS,
    MIMO_MIN_TOKENS,
    MIMO_TOTAL_TOKENS,
    PixelError,
    PixelSpec,
    mimo_spec,
)
from mimo_plugin.core.qwen_pixels import qwen_spec
from mimo_plugin.engines.vllm.vision.names import SETUP_KEY


@dataclass(frozen=True, kw_only=True)
class VisionSetup:
    """One engine's pixel rule.

    Attributes:
        spec: how pixels are wanted; its limits are those of images.
        config: the user's settings.
        video_min_pixels: the fewest pixels of a frame; 0 where videos are left to vLLM.
        video_max_pixels: the most pixels of a frame.
        video_total_max_pixels: the most pixels of all temporal patches of a video.
        item_tokens: embeddings of one medium that the engine's encoder can make; None: not known.
        normalised_later: patch rows hold bytes, which the model's vision tower normalises.
        engine_token: random; the same in all processes of one engine and in no other.
    """

    spec: PixelSpec
    config: VisionConfig
    video_min_pixels: int = 0
    video_max_pixels: int = 0
    video_total_max_pixels: int = 0
    item_tokens: int | None = None
    normalised_later: bool = False
    engine_token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def row_spec(self) -> PixelSpec:
        """What the kernel is to do: all of ``spec``, or what comes before the vision tower."""
        return self.spec.as_bytes() if self.normalised_later else self.spec

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; :meth:`from_dict` makes an equal object of it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> VisionSetup:
        """The object of :meth:`to_dict`, whether or not JSON was in between."""
        spec = {**raw["spec"], "mean": tuple(raw["spec"]["mean"]), "std": tuple(raw["spec"]["std"])}
        return cls(
            **{**raw, "spec": PixelSpec(**spec), "config": VisionConfig(**raw["config"])},
        )


def resolve_setup(
    config: VisionConfig, model: Mapping[str, Any], preprocessor: Mapping[str, Any]
) -> VisionSetup:
    """The set-up of a checkpoint.

    Args:
        config: the user's settings.
        model: its ``config.json``.
        preprocessor: its ``preprocessor_config.json``, empty when there is none.

    Raises:
        PixelError: a value of the checkpoint is missing or out of range.
    """
    spec = mimo_spec(model, preprocessor)
    if config.mean_std == "stock":
        spec = replace(spec, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    limits = model.get("processor_config") or {}
    token_pixels = spec.factor**2
    values: dict[str, Any] = {
        name: limits.get(name) or tokens * token_pixels
        for name, tokens in (
            ("video_min_pixels", MIMO_MIN_TOKENS),
            ("video_max_pixels", MIMO_MAX_TOKENS),
            ("video_total_max_pixels", MIMO_TOTAL_TOKENS),
        )
    }
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PixelError(
                f"processor_config.{name}: found {value!r}; allowed: a whole number above 0"
            )
    return VisionSetup(spec=spec, config=config, **values)


def resolve_qwen_setup(
    config: VisionConfig,
    vision: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    *,
    normalised_later: bool,
) -> VisionSetup:
    """The set-up of a Qwen-VL checkpoint.

    Args:
        config: the user's settings.
        vision: the section ``vision_config`` of its ``config.json``.
        preprocessor: what its image processor says, defaults filled in.
        normalised_later: whether vLLM's vision tower normalises (``--mm-device-do-normalize``).

    Raises:
        PixelError: a value of the checkpoint is out of range, or its files contradict each other.
    """
    spec = qwen_spec(preprocessor)
    for name, wanted in (
        ("patch_size", vision.get("patch_size")),
        ("merge_size", vision.get("spatial_merge_size")),
        ("temporal_patch_size", vision.get("temporal_patch_size")),
    ):
        if getattr(spec, name) != wanted:
            raise PixelError(
                f"image processor {name}: found {getattr(spec, name)}; allowed: {wanted}, as in "
                "the vision_config of the model"
            )
    return VisionSetup(spec=spec, config=config, normalised_later=normalised_later)


def setup_of(hf_config: Any) -> VisionSetup:
    """The set-up that the configuring process wrote into the model's configuration.

    Raises:
        PixelError: there is none, so this model class was chosen by hand.
    """
    raw = getattr(hf_config, SETUP_KEY, None)
    if not isinstance(raw, Mapping):
        raise PixelError(
            f"model configuration: found no {SETUP_KEY}; needed: what the feature vision writes; "
            "fix: start with --plugin mimo:vision instead of naming the architecture"
        )
    return VisionSetup.from_dict(raw)
