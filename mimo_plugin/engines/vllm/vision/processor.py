# SPDX-License-Identifier: Apache-2.0
"""Requests with images and videos: from decoded media to what travels to the model.

vLLM's own processor for MiMo turns pixels into float patch rows here, in the API process. This one
hands them over as bytes. What concerns sounds and precomputed embeddings is upstream's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from transformers import BatchFeature
from vllm.model_executor.models.mimo_v2_omni import (
    MiMoV2OmniMultiModalDataParser,
    MiMoV2OmniMultiModalProcessor,
    MiMoV2OmniProcessingInfo,
)
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseMultiModalProcessor,
    PromptReplacement,
    PromptUpdateDetails,
)
from vllm.transformers_utils.processors.mimo_v2_omni import _format_timestamp

from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm.video.configure import adopt
from mimo_plugin.engines.vllm.video.names import ROWS_KEY, SETUP_KEY
from mimo_plugin.engines.vllm.video.setup import key_of
from mimo_plugin.engines.vllm.vision.budget import FitsEncoder
from mimo_plugin.engines.vllm.vision.limits import limits_of
from mimo_plugin.engines.vllm.vision.packing import (
    SIZES,
    Packed,
    image_frames,
    pack,
    pack_rows,
    video_frames,
)
from mimo_plugin.engines.vllm.vision.report import REPORT
from mimo_plugin.engines.vllm.vision.setup import VisionSetup, setup_of
from mimo_plugin.engines.vllm.vision.timing import (
    VideoTokens,
    frame_times_s,
    patch_times_s,
    stock_times_s,
    video_prompt,
)

logger = logging.getLogger("vllm.mimo_plugin")

_BYTES = SIZES.index("bytes")


class MetadataParser(MiMoV2OmniMultiModalDataParser):  # type: ignore[misc]
    """Keeps the metadata of videos, which upstream drops for this model."""

    def _get_video_with_metadata(self, video: Any) -> tuple[Any, dict[str, Any]]:
        """Frames and metadata; empty where frames came without."""
        frames, metadata = super()._get_video_with_metadata(video)
        return frames, {} if metadata is None else metadata


class MimoOmniInfo(MiMoV2OmniProcessingInfo):  # type: ignore[misc]
    """Upstream's, with a parser that keeps the metadata of videos and sizes by our limits."""

    def get_image_size_with_most_features(self, max_pixels: int | None = None) -> Any:
        """As upstream, by limits that upstream does not read: those under ``images_kwargs``."""
        setup = setup_of(self.get_hf_config())
        if max_pixels is None and setup.config.processor_kwargs == "honour":
            max_pixels = limits_of(setup, self.ctx.get_merged_mm_kwargs({}), "image").max_pixels
        return super().get_image_size_with_most_features(max_pixels)

    def get_max_image_tokens(self) -> int:
        """Tokens of that image, which no later step makes smaller."""
        width, height = self.get_image_size_with_most_features()
        return int(width * height) // setup_of(self.get_hf_config()).spec.factor ** 2

    def get_data_parser(self) -> Any:
        """Upstream's parser with its arguments, as an object of our class."""
        parser = super().get_data_parser()
        parser.__class__ = MetadataParser
        parser.video_needs_metadata = True
        return parser


class MimoOmniProcessor(FitsEncoder, MiMoV2OmniMultiModalProcessor):  # type: ignore[misc]
    """Packs pixels; see the module."""

    def __init__(self, info: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(info, *args, **kwargs)
        adopt(info.get_hf_config())  # this process may not be the one that was configured

    @property
    def setup(self) -> VisionSetup:
        """The engine's set-up."""
        found: VisionSetup | None = getattr(self, "_setup", None)
        if found is None:
            found = self._setup = setup_of(self.info.get_hf_config())
        return found

    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        """The prompt as it came: on a patched engine upstream's class takes out the tokens around
        videos here, which is for ``outer_tokens`` to decide."""
        return list(BaseMultiModalProcessor._postprocess_prompt(self, prompt))

    def _get_hf_mm_inputs(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        """The media as they were decoded: upstream's class makes floats of all frames here."""
        return BaseMultiModalProcessor._get_hf_mm_inputs(self, mm_items, hf_kwargs)

    def _call_hf_processor(
        self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]
    ) -> Any:
        """Fields of images and videos by us, of everything else by upstream.

        Raises:
            PixelError: a request that can't be served; a ValueError, so a client error.
        """
        rest = dict(hf_data)
        if "video_audio" in rest:
            raise PixelError(
                "a video interleaved with its sound is not served with the feature vision; fix: "
                "send both apart, or leave vision out of --plugin mimo:…"
            )
        images: Any = rest.pop("images", None)
        videos: Any = rest.pop("videos", None)
        fields = BatchFeature(data={})
        if rest.keys() - {"text"}:
            fields.update(super()._call_hf_processor(rest, hf_kwargs))
        kwargs = self.info.ctx.get_merged_mm_kwargs(hf_kwargs)
        with REPORT.packing():
            if images is not None:
                fields.update(self._image_fields(_listed(images), kwargs))
            if videos is not None:
                fields.update(self._video_fields(_listed(videos), kwargs))
        return fields

    def _image_fields(self, images: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        packed = self._pack("image", ((image, {}) for image in images), kwargs)
        return self._pixel_fields("image", packed)

    def _video_fields(self, videos: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        pairs = [video if isinstance(video, tuple) else (video, {}) for video in videos]
        packed = self._pack("video", pairs, kwargs)
        fields = self._pixel_fields("video", packed)
        patch = self.setup.spec.temporal_patch_size
        steps_s, starts_s, times = [], [], []
        for one, (_, metadata) in zip(packed, pairs, strict=True):
            times_s = self._times_s(one.item.frames, metadata)
            gap_s = times_s[1] - times_s[0] if len(times_s) > 1 else 0.0
            steps_s.append(patch * (gap_s if gap_s > 0 else 1.0))
            starts_s.append(times_s[0])
            times.append(torch.tensor(patch_times_s(times_s, patch), dtype=torch.float64))
        fields["second_per_grid_ts"] = torch.tensor(steps_s, dtype=torch.float32)
        fields["video_start_times"] = torch.tensor(starts_s, dtype=torch.float32)
        fields["video_patch_times"] = times
        return fields

    def _times_s(self, frames: int, metadata: Mapping[str, Any]) -> tuple[float, ...]:
        known = None
        if self.setup.config.timestamps == "frames":
            known = frame_times_s(frames, metadata)
        return stock_times_s(frames) if known is None else known

    def _pack(
        self,
        kind: str,
        media: Iterable[tuple[Any, Mapping[str, Any]]],
        kwargs: Mapping[str, Any],
    ) -> list[Packed]:
        """Pack media, each with its metadata, of one kind; those that are refused are counted."""
        setup = self.setup
        try:
            limits = limits_of(setup, kwargs, kind)
            once = kind == "image" and setup.config.once
            dtype = self.info.ctx.model_config.dtype
            decoded = image_frames if kind == "image" else video_frames
            packed = []
            for one, metadata in media:
                self._check_loader(metadata)
                if ROWS_KEY in metadata:
                    packed.append(pack_rows(one, metadata, setup, limits, dtype))
                else:
                    packed.append(pack(decoded(one), setup, limits, dtype, once=once))
        except PixelError:
            REPORT.refused(kind)
            raise
        for one in packed:
            REPORT.packed(kind, one.rows, one.data.numel())
        return packed

    def _check_loader(self, metadata: Mapping[str, Any]) -> None:
        """Refuse a video that was read by the rules of another engine of this process."""
        if not {SETUP_KEY, ROWS_KEY} & metadata.keys():
            return  # of vLLM's own loaders, or none
        found = metadata.get(SETUP_KEY)
        if found is None or found != key_of(self.info.get_hf_config()):
            raise PixelError(
                f"media_io_kwargs.video.{SETUP_KEY}: found {found!r}, which is another engine's; "
                "fix: leave it out of the request"
            )

    @staticmethod
    def _pixel_fields(kind: str, packed: Sequence[Packed]) -> dict[str, Any]:
        data = [one.data for one in packed]
        # The copy of a single video is on purpose: the loader's shared memory shall come free, and
        # vLLM may keep what it is given in a cache.
        copied = kind == "video" or len(data) > 1
        return {
            f"{kind}_pixels": torch.cat(data) if copied else data[0],
            f"{kind}_sizes": torch.tensor([one.sizes for one in packed], dtype=torch.int64),
            f"{kind}_grid_thw": torch.tensor([one.grid for one in packed], dtype=torch.int32),
        }

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> dict[str, Any]:
        """How the fields are cut into items: upstream's, and ours beside them."""
        config = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))
        for kind in ("image", "video"):
            sizes = hf_inputs.get(f"{kind}_sizes")
            if sizes is not None:
                config[f"{kind}_pixels"] = MultiModalFieldConfig.flat_from_sizes(
                    kind, sizes[:, _BYTES]
                )
                config[f"{kind}_sizes"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
        if "video_patch_times" in hf_inputs:
            config["video_patch_times"] = MultiModalFieldConfig.batched("video", keep_on_cpu=True)
        return config

    def _get_prompt_updates(
        self,
        mm_items: Any,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: Any,
    ) -> Sequence[Any]:
        """Tokens that replace the placeholders: upstream's, for videos with our fixes."""
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        core = self.info.get_hf_processor().mimo_processor
        tokens = VideoTokens(
            video_start=core.video_start_token_id,
            video_end=core.video_end_token_id,
            vision_start=core.vision_start_token_id,
            vision_end=core.vision_end_token_id,
            video_pad=core.video_token_id,
        )
        tokenizer = self.info.get_tokenizer()

        def label(time_s: float) -> list[int]:
            text = _format_timestamp(time_s)
            return list(tokenizer.encode(text, add_special_tokens=False))

        @cache  # asked for once for each target
        def expanded(index: int) -> tuple[list[int], Any]:
            item = out_mm_kwargs["video"][index]
            _, height, width = item["video_grid_thw"].data.tolist()
            times_s = item["video_patch_times"].data.tolist()
            per_patch = height * width // core.merge_size**2
            full, embeds = video_prompt(times_s, per_patch, tokens, label)
            return full, torch.tensor(embeds)

        def replacement(index: int) -> Any:
            full, mask = expanded(index)
            return PromptUpdateDetails(full=full, is_embed=lambda _: mask)

        bare = [tokens.video_pad]
        outer = [tokens.vision_start, *bare, tokens.vision_end]
        # With the pair removed, a prompt that has the bare placeholder is served all the same.
        targets = [bare] if self.setup.config.outer_tokens == "stock" else [outer, bare]
        return [
            *(update for update in updates if update.modality != "video"),
            *(
                PromptReplacement(modality="video", target=target, replacement=replacement)
                for target in targets
            ),
        ]


def _listed(media: Any) -> Sequence[Any]:
    return media if isinstance(media, (list, tuple)) else [media]
