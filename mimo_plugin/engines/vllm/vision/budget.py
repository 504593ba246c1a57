# SPDX-License-Identifier: Apache-2.0
"""How many embeddings the engine's encoder makes and keeps, and what that means for requests.

vLLM sizes two things by the largest medium that the model admits, or the tokens of a step where
those are more: what the encoder makes in a step, and the cache of its results. So one medium always
fits; several of a prompt may not, and are then made one after the other as the prompt moves on.
vLLM compares a medium with the cache only, so a larger cache must not admit what no step can make.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mimo_plugin.config_vision import CACHE_LIMIT, VisionConfig
from mimo_plugin.core.pixels import Item, PixelError, patch_rows_of
from mimo_plugin.engines.vllm.vision.setup import VisionSetup

logger = logging.getLogger("vllm.mimo_plugin")

_MIB = 2**20


@dataclass(frozen=True)
class EncoderBudget:
    """Of one engine; numbers are embeddings, one for each token that stands for a medium.

    Attributes:
        step_tokens: what the encoder makes in one step at most; no medium may have more.
        cache_tokens: what its cache holds in stock vLLM.
        largest: of the largest medium, by kind.
        limits: media that one prompt may have, by kind; 999 where the user sets no limit.
        context_tokens: the engine's context length, which no prompt is longer than.
    """

    step_tokens: int
    cache_tokens: int
    largest: Mapping[str, int]
    limits: Mapping[str, int]
    context_tokens: int

    def per_prompt(self, kind: str) -> int:
        """The largest media of a kind that a prompt can have, by limit and context length."""
        return max(1, min(self.limits[kind], self.context_tokens // self.largest[kind]))

    def cache_size(self, wanted: int | str | None) -> int:
        """Size of the cache.

        Args:
            wanted: setting ``encoder_cache_tokens``. ``limit`` has room for every prompt: for all
                media that the limits admit, or as many as the context holds. Never less than the
                largest medium, for which vLLM makes room in any case.
        """
        if wanted is None:
            return self.cache_tokens
        if wanted == CACHE_LIMIT:
            media = sum(self.limits[kind] * most for kind, most in self.largest.items())
            wanted = min(media, self.context_tokens)
        return max(int(wanted), *self.largest.values(), 1)

    def short(self, cache_tokens: int) -> list[str]:
        """Kinds of which a prompt can have more large media than the cache holds at once."""
        return [
            kind
            for kind, most in self.largest.items()
            if most and cache_tokens // most < self.per_prompt(kind)
        ]


def read_budget(vllm_config: Any) -> EncoderBudget:
    """What every process of the engine will work out from this configuration."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    found = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
    largest = {kind: most for kind, most in found.mm_max_toks_per_item.items() if most > 0}
    multimodal = vllm_config.model_config.multimodal_config
    return EncoderBudget(
        step_tokens=found.encoder_compute_budget,
        cache_tokens=found.encoder_cache_size,
        largest=largest,
        limits={kind: multimodal.get_limit_per_prompt(kind) for kind in largest},
        context_tokens=vllm_config.model_config.max_model_len,
    )


def settle_budget(vllm_config: Any, setup: VisionSetup) -> VisionSetup:
    """Size the encoder cache as the user wants it, and say what fits.

    The size is written where scheduler and API process read it.

    Returns:
        ``setup`` with the most embeddings that one medium may have.
    """
    budget, wanted = read_budget(vllm_config), setup.config.encoder_cache_tokens
    size = budget.cache_size(wanted)
    if wanted is not None:
        vllm_config.scheduler_config.encoder_cache_size = size
        size = read_budget(vllm_config).cache_tokens
    _report(vllm_config, budget, size, setup.config)
    return replace(setup, item_tokens=budget.step_tokens)


def check_budget(item: Item, setup: VisionSetup) -> None:
    """As :func:`check_tokens`, for an image or a video of which nothing is made yet.

    Raises:
        PixelError: both numbers, and what to do.
    """
    name = "image" if item.frames == 1 else f"video of {item.frames} frames"
    tokens = patch_rows_of(setup.spec, item) // setup.spec.merge_size**2
    check_tokens(f"{name} of {item.height}x{item.width} pixels", tokens, setup)


def check_tokens(what: str, tokens: int, setup: VisionSetup) -> None:
    """Refuse a medium that no step of the encoder has room for: it would wait forever.

    Args:
        what: the medium, for the message.
        tokens: its embeddings.
        setup: of the engine.

    Raises:
        PixelError: both numbers, and what to do.
    """
    most = setup.item_tokens
    if most is not None and tokens > most:
        raise PixelError(
            f"{what}: {tokens} embedding tokens, but the encoder of this engine takes at most "
            f"{most} for one medium; fix: a smaller one, a smaller max_pixels in "
            "mm_processor_kwargs, or a larger --max-num-batched-tokens"
        )


class FitsEncoder:
    """Stands before a processor of vLLM: no medium waits for room that no step has."""

    setup: Any  # a property of the processors

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """As upstream; sounds and embeddings that a request brings are checked as well.

        Raises:
            PixelError: a medium has more embeddings than a step of the encoder makes.
        """
        made = super().apply(inputs, timing_ctx)  # type: ignore[misc]
        for kind, places in made["mm_placeholders"].items():
            for place in places:
                check_tokens(kind, place.get_num_embeds(), self.setup)
        return made


def _report(vllm_config: Any, budget: EncoderBudget, size: int, config: VisionConfig) -> None:
    """One line: the size of the cache, its memory, and how many large media it holds at once."""
    if not budget.largest:
        return
    one = _bytes_of_embedding(vllm_config.model_config)
    held = ", ".join(
        f"{size // most} of {kind} ({most} embeddings each, {budget.per_prompt(kind)} in a prompt)"
        for kind, most in budget.largest.items()
    )
    text = (
        f"mimo vision: encoder cache of {size} embeddings, up to {size * one / _MIB:.1f} MiB; of "
        f"the largest media, as vLLM counts them, it holds at once {held}"
    )
    beyond = size - budget.step_tokens
    if beyond > 0:
        text += (
            f"; {beyond * one / _MIB:.1f} MiB of it are not in what vLLM measures at start: leave "
            "them free with --gpu-memory-utilization"
        )
    wanted = config.encoder_cache_tokens
    if isinstance(wanted, int) and wanted < size:
        text += f"; mimo.vision.encoder_cache_tokens is {wanted}, less than the largest medium"
    short = budget.short(size)
    limited = vllm_config.model_config.multimodal_config.limit_per_prompt
    if not any(kind in limited for kind in short):  # a limit that nobody set promises nothing
        logger.info("%s", text)
        return
    logger.warning(
        "%s; a prompt with more of them is served, one after the other; fix: "
        'mimo.vision.encoder_cache_tokens "%s" (%d), or a smaller --limit-mm-per-prompt',
        text,
        CACHE_LIMIT,
        budget.cache_size(CACHE_LIMIT),
    )


def _bytes_of_embedding(model_config: Any) -> int:
    """Bytes of one embedding in the cache, the levels that some towers hand over included."""
    vision = getattr(model_config.hf_config, "vision_config", None)
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    width: int = model_config.get_inputs_embeds_size()
    return width * levels * int(model_config.dtype.itemsize)
