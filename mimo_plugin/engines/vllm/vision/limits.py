# SPDX-License-Identifier: Apache-2.0
"""Pixel limits of one request: the checkpoint's, with what ``mm_processor_kwargs`` changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core.pixels import Item, PixelError, PixelSpec, target_size
from mimo_plugin.engines.vllm.vision.setup import VisionSetup

SCOPES = {"images_kwargs": "image", "videos_kwargs": "video"}
"""Keys whose value holds settings of one kind of medium only, as in transformers."""

_SIZE_KEYS = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
_LIMITS: dict[str, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels"),
    "video": ("min_pixels", "max_pixels", "total_max_pixels"),
}


@dataclass(frozen=True)
class Limits:
    """Pixels of a target: at least, at most; for videos at most over all temporal patches."""

    min_pixels: int
    max_pixels: int
    total_max_pixels: int | None = None

    def of_frames(self, frames: int, temporal_patch_size: int) -> Limits:
        """The limits of each of ``frames`` frames, which share the total of a video.

        The rule is that of vLLM's MiMo processor: the total is of temporal patches, and a frame
        never gets less than ``min_pixels``.
        """
        if self.total_max_pixels is None:
            return self
        share = self.total_max_pixels * temporal_patch_size // max(frames, 1)
        most = max(self.min_pixels, min(share, self.max_pixels))
        return Limits(self.min_pixels, most)


def sized(spec: PixelSpec, limits: Limits, frames: int, height: int, width: int) -> Item:
    """A medium and the size that the model sees of it.

    Raises:
        PixelError: no frames, or a size that the model has no target for.
    """
    if not frames:
        raise PixelError("video of 0 frames: at least 1 is needed")
    limits = limits.of_frames(frames, spec.temporal_patch_size)
    target = target_size(
        spec, height, width, min_pixels=limits.min_pixels, max_pixels=limits.max_pixels
    )
    return Item(frames, height, width, *target)


def limits_of(setup: VisionSetup, kwargs: Mapping[str, Any], kind: str) -> Limits:
    """Limits of the images or videos of a request.

    Args:
        setup: of the engine.
        kwargs: ``mm_processor_kwargs`` of engine and request, merged.
        kind: ``image`` or ``video``.

    Raises:
        PixelError: an unknown key, or a value out of range.
    """
    if kind == "image":
        values = {"min_pixels": setup.spec.min_pixels, "max_pixels": setup.spec.max_pixels}
    else:
        values = {
            "min_pixels": setup.video_min_pixels,
            "max_pixels": setup.video_max_pixels,
            "total_max_pixels": setup.video_total_max_pixels,
        }
    if setup.config.processor_kwargs == "honour":
        values.update(_overrides(kwargs, kind))
    return checked(values, kind)


def checked(values: Mapping[str, int], kind: str) -> Limits:
    """The limits ``values``.

    Raises:
        PixelError: no size lies between them.
    """
    if values["min_pixels"] > values["max_pixels"]:
        raise PixelError(
            f"mm_processor_kwargs: found {kind} limits min_pixels {values['min_pixels']}, "
            f"max_pixels {values['max_pixels']}; allowed: the first not above the second"
        )
    return Limits(**values)


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse settings that the feature would have to ignore.

    Raises:
        PixelError: an unknown key, or a value out of range.
    """
    for kind in _LIMITS:
        _overrides(kwargs, kind)


def _overrides(kwargs: Mapping[str, Any], kind: str) -> dict[str, int]:
    found: dict[str, int] = {}
    scoped: Any = {}
    for key, value in kwargs.items():
        if key in SCOPES:
            _check_keys(key, value, _LIMITS[SCOPES[key]])
            scoped = value if SCOPES[key] == kind else scoped
        elif key == "device":
            if str(value) != "cpu":
                raise PixelError(
                    f"mm_processor_kwargs.device: found {value!r}; allowed: cpu; the feature "
                    "vision makes pixels on the model's device"
                )
        elif key not in ("size", *_LIMITS["video"]):
            raise _unknown(f"mm_processor_kwargs.{key}", value, (*SCOPES, *_LIMITS["video"]))
    for source in (kwargs, scoped):
        found.update(limits_in(source, kind))
    return found


def limits_in(source: Mapping[str, Any], kind: str) -> dict[str, int]:
    """What ``size`` and the limits in ``source`` say about media of this kind.

    Raises:
        PixelError: an unknown edge, or a value out of range.
    """
    found: dict[str, int] = {}
    size = source.get("size")
    if size is not None:
        if not isinstance(size, Mapping):
            raise bad_kwarg("size", size, "an object with shortest_edge and longest_edge")
        for edge, value in size.items():
            if edge not in _SIZE_KEYS:
                raise bad_kwarg(f"size.{edge}", value, f"only {' and '.join(_SIZE_KEYS)}")
            found[_SIZE_KEYS[edge]] = _count(f"size.{edge}", value)
    for name in _LIMITS[kind]:
        if source.get(name) is not None:
            found[name] = _count(name, source[name])
    return found


def _check_keys(scope: str, value: object, allowed: Iterable[str]) -> None:
    if not isinstance(value, Mapping):
        raise bad_kwarg(scope, value, "an object")
    for key in value:
        if key not in ("size", *allowed):
            raise _unknown(f"mm_processor_kwargs.{scope}.{key}", value[key], allowed)


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_kwarg(name, value, "a whole number of pixels above 0")
    return value


def _unknown(name: str, value: object, allowed: Iterable[str]) -> PixelError:
    return PixelError(f"{name}: found {value!r}; allowed keys: size, {', '.join(allowed)}")


def bad_kwarg(name: str, value: object, allowed: str) -> PixelError:
    """A processor setting of an engine or a request that can't be served."""
    return PixelError(f"mm_processor_kwargs.{name}: found {value!r}; allowed: {allowed}")
