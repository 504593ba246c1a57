# SPDX-License-Identifier: Apache-2.0
"""The KV feature's settings, with what can be derived from the engine's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from mimo_plugin.chat_template import message_starts_from
from mimo_plugin.core import retention
from mimo_plugin.errors import setting_error

logger = logging.getLogger("vllm.mimo_plugin")


@dataclass(frozen=True, slots=True)
class KvSettings:
    """``KvConfig`` made concrete; see ``config.py`` for the meaning of each field."""

    swa_share: float = 0.6
    strict_split: bool = False
    classes: tuple[str, ...] = retention.CLASSES
    message_start_token_ids: frozenset[int] = frozenset()
    ladder_min_tokens: int | None = None
    ladder_growth: float = 0.25
    draft_share: float = 0.25
    memoise: bool = True
    #: windows may come from lower tiers, so full blocks are of use without one
    tiers_below: bool = False


def resolve_settings(config: Any, vllm_config: Any, *, tiers_below: bool = False) -> KvSettings:
    """Settings from a ``KvConfig``; message start ids come from the tokenizer if not given.

    Args:
        config: the feature's section.
        vllm_config: vLLM's.
        tiers_below: the feature ``tiers`` is on.

    Raises:
        ConfigError: ids given in the configuration are outside the vocabulary.
    """
    given = config.message_start_token_ids
    if given is None:
        ids = message_starts_of(vllm_config) if retention.BOUNDARY in config.classes else ()
    else:
        vocabulary = vllm_config.model_config.get_vocab_size()
        wrong = [i for i in given if not 0 <= i < vocabulary]
        if wrong:
            raise setting_error(
                "kv.message_start_token_ids",
                wrong,
                f"token ids from 0 to {vocabulary - 1}",
                "take the ids of the chat template's message start from the tokenizer",
            )
        ids = tuple(given)
    return KvSettings(
        swa_share=config.swa_share,
        strict_split=config.strict_split,
        classes=tuple(config.classes),
        message_start_token_ids=frozenset(ids),
        ladder_min_tokens=config.ladder_min_tokens,
        ladder_growth=config.ladder_growth,
        draft_share=config.draft_share,
        memoise=config.memoise,
        tiers_below=tiers_below,
    )


def message_starts_of(vllm_config: Any) -> tuple[int, ...]:
    """Ids of the special tokens that open a message in the model's chat template; () if unknown."""
    model_config = vllm_config.model_config
    if model_config.skip_tokenizer_init:
        return ()
    try:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(model_config)
    except Exception as error:  # a tokenizer that can't be read must not stop the engine
        logger.warning("mimo kv: no message boundaries, the tokenizer can't be read: %s", error)
        return ()
    return message_starts_from(tokenizer, logger)
