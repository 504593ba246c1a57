# SPDX-License-Identifier: Apache-2.0
"""The KV feature's settings on SGLang, with what follows from the model and the pools."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mimo_plugin.chat_template import message_starts_from
from mimo_plugin.config import KvConfig
from mimo_plugin.core import retention
from mimo_plugin.core.retention import Ladder, RetentionRule
from mimo_plugin.core.window import GroupGeometry

logger = logging.getLogger("sglang.mimo_plugin")


def swa_group(history_tokens: int, page_tokens: int) -> GroupGeometry:
    """Geometry of the sliding-window layers.

    Args:
        history_tokens: cached tokens that SGLang wants before a hit's end
            (``sliding_window_size`` of its radix cache); a window of one more, as the query's own
            token is part of a window.
        page_tokens: tokens in a page.
    """
    return GroupGeometry(block_size_tokens=page_tokens, window_tokens=history_tokens + 1)


def retention_rule(config: KvConfig, group: GroupGeometry) -> RetentionRule:
    """Retention for pages of ``group``.

    SGLang's two pools are physical: a sliding-window page costs nothing that full attention could
    use, so the ladder starts at one window. Rungs no further apart than a window leave no gap: up
    to ``window / ladder_growth`` tokens any page of a prompt can be resumed at.
    """
    window_tokens = group.window_blocks * group.block_size_tokens
    smallest = config.ladder_min_tokens or max(window_tokens, group.block_size_tokens)
    return RetentionRule(
        alignment_tokens=group.block_size_tokens,
        lookahead_tokens=0,
        classes=frozenset(config.classes),
        ladder=Ladder(smallest, config.ladder_growth, group.block_size_tokens),
    )


def message_start_ids(config: KvConfig, tokenizer: Callable[[], Any]) -> frozenset[int]:
    """Ids of the tokens that open a chat message: as configured, or from the chat template.

    Args:
        config: the feature's settings.
        tokenizer: returns the model's tokenizer, or None where there is none.
    """
    if config.message_start_token_ids is not None:
        return frozenset(config.message_start_token_ids)
    if retention.BOUNDARY not in config.classes:
        return frozenset()
    try:
        found = tokenizer()
    except Exception as error:  # a tokenizer that can't be read must not stop the engine
        logger.warning("mimo kv: no message boundaries, the tokenizer can't be read: %s", error)
        return frozenset()
    return frozenset(message_starts_from(found, logger)) if found is not None else frozenset()
