# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint wants its pixels: resize rule, sizes, mean and standard deviation, patch grid.

Sizes are pixels, heights come before widths. Means and standard deviations are of values 0..255.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

CHANNELS = 3
RESAMPLES = ("bilinear", "bicubic")

MAX_ASPECT = 200
"""The longest side over the shortest that both families accept (MiMo checks sides of at least a
block only)."""

HOST_RESIZE_RATIO = 4
"""Source pixels per target pixel above which the host resizes: then the copy to the device is
dearer than the work."""

MAX_FRAME_BYTES = 2**31 - 1
"""Kernels count bytes within a frame in 32 bits; between frames in 64."""

IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
"""What MiMo's reference processor uses where the checkpoint says nothing."""

MIMO_MIN_TOKENS, MIMO_MAX_TOKENS, MIMO_TOTAL_TOKENS = 4, 4096, 16384
"""MiMo's limits where its configuration has none, as in vLLM's processor: tokens of an image or a
frame, at least and at most, and of all temporal patches of a video."""


class PixelError(ValueError):
    """An image, a video or a processor setting that can't be served; one line that says why."""


@dataclass(frozen=True)
class PixelSpec:
    """How a checkpoint wants its pixels.

    Attributes:
        resample: ``bilinear``: MiMo's, ``align_corners=False``, no antialias, in float32;
            ``bicubic``: Pillow's antialiased one, whose result is uint8.
        mean: per channel, of values 0..255.
        std: per channel, of values 0..255.
        patch_size: side of a patch.
        merge_size: patches along a side of the block that becomes one token.
        temporal_patch_size: frames in a patch.
        min_pixels: the fewest pixels of a target.
        max_pixels: the most pixels of a target.
        rescale: factor that the checkpoint's processor applies before mean and standard
            deviation. It only decides how the bicubic table is rounded.

    Raises:
        PixelError: a value is out of range.
    """

    resample: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    rescale: float = 1 / 255

    def __post_init__(self) -> None:
        if self.resample not in RESAMPLES:
            raise bad_setting("resample", self.resample, f"one of {', '.join(RESAMPLES)}")
        for name in ("patch_size", "merge_size", "temporal_patch_size", "min_pixels"):
            if not _is_count(getattr(self, name)):
                raise bad_setting(name, getattr(self, name), "a whole number above 0")
        if not _is_count(self.max_pixels) or self.max_pixels < self.min_pixels:
            allowed = f"a whole number not below min_pixels ({self.min_pixels})"
            raise bad_setting("max_pixels", self.max_pixels, allowed)
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != CHANNELS or not all(map(math.isfinite, values)):
                raise bad_setting(name, values, f"{CHANNELS} finite numbers")
        if min(self.std) <= 0 or not self.rescale > 0:
            raise bad_setting("std, rescale", (self.std, self.rescale), "above 0")

    @property
    def factor(self) -> int:
        """Side of the block of patches that becomes one token; targets are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def keeps_bytes(self) -> bool:
        """Whether values stay the whole numbers 0..255 that a bicubic resize gives."""
        unchanged = (self.mean, self.std, self.rescale) == ((0.0,) * 3, (1.0,) * 3, 1.0)
        return unchanged and self.resample == "bicubic"

    def as_bytes(self) -> PixelSpec:
        """The same rule, resized and cut into patches only.

        Raises:
            PixelError: the resize gives no whole numbers.
        """
        if self.resample != "bicubic":
            raise bad_setting("resample", self.resample, "bicubic, whose result is bytes")
        return replace(self, mean=(0.0,) * 3, std=(1.0,) * 3, rescale=1.0)

    def row_values(self, *, once: bool = False) -> int:
        """Values in a patch row; with ``once`` a still is not repeated over the patch's frames."""
        frames = 1 if once else self.temporal_patch_size
        return CHANNELS * frames * self.patch_size**2


class Item(NamedTuple):
    """A still (``frames == 1``) or a video, before and after the resize."""

    frames: int
    height: int
    width: int
    target_height: int
    target_width: int

    @property
    def source_bytes(self) -> int:
        """Bytes of its frames as packed RGB."""
        return self.frames * self.height * self.width * CHANNELS


def mimo_spec(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> PixelSpec:
    """The rule of a MiMo checkpoint.

    Args:
        config: its ``config.json``: ``vision_config`` gives the patch, ``processor_config`` the
            limits ``image_min_pixels`` and ``image_max_pixels`` (4 and 4096 tokens without them).
        preprocessor: its ``preprocessor_config.json``, empty when there is none:
            ``image_mean`` and ``image_std``, ImageNet's without them.

    Raises:
        PixelError: a value is missing or out of range.
    """
    vision = _section(config, "vision_config")
    limits = _section(config, "processor_config", required=False)
    patch = _count_of(vision, "vision_config.patch_size")
    merge = _count_of(vision, "vision_config.spatial_merge_size")
    token = (patch * merge) ** 2 if _is_count(patch) and _is_count(merge) else 1
    factor = rescale_of(preprocessor)
    return PixelSpec(
        resample="bilinear",
        mean=channel_values(preprocessor, "image_mean", factor, IMAGENET_MEAN),
        std=channel_values(preprocessor, "image_std", factor, IMAGENET_STD),
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=_count_of(vision, "vision_config.temporal_patch_size"),
        min_pixels=limits.get("image_min_pixels") or MIMO_MIN_TOKENS * token,
        max_pixels=limits.get("image_max_pixels") or MIMO_MAX_TOKENS * token,
    )


def target_size(
    spec: PixelSpec,
    height: int,
    width: int,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> tuple[int, int]:
    """Height and width that the model sees: multiples of ``spec.factor`` within the pixel limits.

    The two families differ for sides below the factor. MiMo first enlarges the image until its
    short side has it, whatever its shape; Qwen does not, and keeps at least one block when it
    shrinks. Sources: ``_smart_resize`` in vLLM's MiMo processor, ``smart_resize`` of transformers.

    Args:
        spec: the checkpoint's rule.
        height: of the source.
        width: of the source.
        min_pixels: instead of the checkpoint's.
        max_pixels: instead of the checkpoint's.

    Raises:
        PixelError: no pixels, a side ratio above ``MAX_ASPECT``, or a size that no target fits.
    """
    least = spec.min_pixels if min_pixels is None else min_pixels
    most = spec.max_pixels if max_pixels is None else max_pixels
    if not (_is_count(least) and _is_count(most)) or least > most:
        raise PixelError(
            f"pixel limits: found min_pixels {least}, max_pixels {most}; "
            "allowed: whole numbers above 0, the first not above the second"
        )
    if not (_is_count(height) and _is_count(width)):
        raise PixelError(f"image of {height}x{width} pixels: both sides must be at least 1")
    mimo = spec.resample == "bilinear"
    exempt = mimo and min(height, width) < spec.factor
    if max(height, width) > MAX_ASPECT * min(height, width) and not exempt:
        raise PixelError(
            f"image of {height}x{width} pixels: the long side may be at most {MAX_ASPECT} times "
            "the short one"
        )
    if mimo:
        size = _mimo_size(height, width, spec.factor, least, most)
    else:
        size = _scaled(height, width, spec.factor, least, most, floor=spec.factor)
    if min(size) < spec.factor:
        raise PixelError(
            f"image of {height}x{width} pixels: no target of at most {most} pixels with sides "
            f"that are multiples of {spec.factor} keeps its shape"
        )
    return size


def _mimo_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    if min(height, width) < factor:
        if height < width:
            height, width = factor, int(width * factor / height)
        else:
            height, width = int(height * factor / width), factor
    return _scaled(height, width, factor, least, most, floor=0)


def _scaled(
    height: int, width: int, factor: int, least: int, most: int, *, floor: int
) -> tuple[int, int]:
    """Nearest multiples (ties to even), then scaled into the limits; floats as upstream."""
    rounded = (round(height / factor) * factor, round(width / factor) * factor)
    if rounded[0] * rounded[1] > most:
        shrink = math.sqrt(height * width / most)
        return (
            max(floor, math.floor(height / shrink / factor) * factor),
            max(floor, math.floor(width / shrink / factor) * factor),
        )
    if rounded[0] * rounded[1] < least:
        grow = math.sqrt(least / (height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return rounded


def resize_on_host(
    source_pixels: int, target_pixels: int, ratio: float = HOST_RESIZE_RATIO
) -> bool:
    """Whether so many source pixels are better shrunk before they go to the device."""
    return source_pixels > ratio * target_pixels


def check_item(spec: PixelSpec, item: Item) -> None:
    """Refuse an item that has no pixels or whose target is no whole number of blocks.

    Raises:
        PixelError: one line with the numbers.
    """
    if not _is_count(item.frames):
        raise PixelError(f"video of {item.frames} frames: at least 1 is needed")
    if not (_is_count(item.height) and _is_count(item.width)):
        raise PixelError(
            f"image of {item.height}x{item.width} pixels: both sides must be at least 1"
        )
    for side in (item.target_height, item.target_width):
        if not _is_count(side) or side % spec.factor:
            raise PixelError(
                f"target of {item.target_height}x{item.target_width} pixels: both sides must be "
                f"multiples of {spec.factor} above 0"
            )


def check_batch(
    spec: PixelSpec, items: Sequence[Item], packed_bytes: int, *, once: bool = False
) -> None:
    """Refuse items that can't be served, or that do not fill the packed pixels.

    Args:
        spec: how the pixels are wanted.
        items: what lies in the packed pixels.
        packed_bytes: their size.
        once: whether stills are to be written once; then there may be no videos.

    Raises:
        PixelError: one line with the numbers.
    """
    if not items:
        raise PixelError("no image and no video was given: at least 1 is needed")
    for item in items:
        check_item(spec, item)
        if item.height * item.width * CHANNELS > MAX_FRAME_BYTES:
            raise PixelError(
                f"image of {item.height}x{item.width} pixels: a frame may have at most "
                f"{MAX_FRAME_BYTES} bytes as RGB"
            )
        if once and item.frames > 1:
            raise PixelError(
                f"once=True with a video of {item.frames} frames: only stills can be written once"
            )
    needed = sum(item.source_bytes for item in items)
    if needed != packed_bytes:
        raise PixelError(
            f"packed pixels: found {packed_bytes} bytes, the {len(items)} items have {needed}"
        )


def grid_of(spec: PixelSpec, item: Item) -> tuple[int, int, int]:
    """Patches of an item: in time, down and across. A last frame is repeated to fill a patch."""
    return (
        -(-item.frames // spec.temporal_patch_size),
        item.target_height // spec.patch_size,
        item.target_width // spec.patch_size,
    )


def patch_rows_of(spec: PixelSpec, item: Item) -> int:
    """Patch rows of an item."""
    return math.prod(grid_of(spec, item))


def rescale_of(preprocessor: Mapping[str, Any]) -> float:
    """The factor that brings pixels to the range that mean and standard deviation are of."""
    if preprocessor.get("do_rescale") is False:
        return 1.0
    factor = preprocessor.get("rescale_factor")
    if factor is None:
        return 1 / 255
    if not isinstance(factor, (int, float)) or not factor > 0:
        raise bad_setting("rescale_factor", factor, "a number above 0")
    return float(factor)


def channel_values(
    preprocessor: Mapping[str, Any],
    name: str,
    factor: float,
    default: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> tuple[float, float, float]:
    """A setting with a number per channel, of values 0..255."""
    values = preprocessor.get(name)
    if values is None:
        return default
    if isinstance(values, (int, float)):
        values = (values,) * CHANNELS
    if len(values) != CHANNELS or not all(isinstance(v, (int, float)) for v in values):
        raise bad_setting(name, values, f"{CHANNELS} numbers")
    red, green, blue = (v / factor for v in values)
    return red, green, blue


def _section(config: Mapping[str, Any], name: str, *, required: bool = True) -> Mapping[str, Any]:
    found = config.get(name)
    if found is None and not required:
        return {}
    if not isinstance(found, Mapping):
        raise bad_setting(name, found, "an object with the vision tower's sizes")
    return found


def _count_of(section: Mapping[str, Any], name: str) -> Any:
    return section.get(name.rpartition(".")[2])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def bad_setting(setting: str, found: object, allowed: str) -> PixelError:
    return PixelError(f"processor setting {setting}: found {found!r}; allowed: {allowed}")
