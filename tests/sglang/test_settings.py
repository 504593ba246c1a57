# SPDX-License-Identifier: Apache-2.0
"""Settings on SGLang: the window as its radix cache counts it, the ladder, message starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.config import KvConfig
from mimo_plugin.core.segments import cut
from mimo_plugin.core.window import blocks_for_hit
from mimo_plugin.engines.sglang.kv.settings import message_start_ids, retention_rule, swa_group


@pytest.mark.parametrize(
    ("history", "page", "pages"),
    [(128, 16, 8), (127, 16, 8), (129, 16, 9), (128, 64, 2), (5, 1, 5)],
)
def test_the_window_is_what_a_match_wants(history: int, page: int, pages: int) -> None:
    """SGLang accepts a hit when at least ``history`` tokens before its end are there."""
    group = swa_group(history, page)
    assert group.window_blocks == pages
    assert len(blocks_for_hit(group, 100 * page)) * page >= history


@given(
    history=st.integers(1, 300),
    page=st.sampled_from([1, 16, 64]),
    growth=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    prompt=st.integers(1, 3000),
)
def test_short_prompts_are_kept_whole(history: int, page: int, growth: float, prompt: int) -> None:
    """Up to ``window / growth`` tokens any page of a prompt can be resumed at."""
    group = swa_group(history, page)
    rule = retention_rule(KvConfig(ladder_growth=growth), group)
    window = group.window_blocks * page
    end = rule.align(prompt)
    if not end:
        return
    plan = dict(rule.plan(0, end, prompt))
    plan.setdefault(end, "none")
    kept: set[int] = set()
    for segment in cut(sorted(plan.items()), group, 0, 0):
        kept |= set(range(segment.start, segment.end))
    dense = min(end, int(window / growth))
    assert set(range(dense)) <= kept


@given(st.integers(1, 20_000))
def test_the_ladder_bounds_the_loss(prompt: int) -> None:
    group = swa_group(128, 16)
    rule = retention_rule(KvConfig(), group)
    end = rule.align(prompt)
    plan = [tokens for tokens, _ in rule.plan(0, end, prompt)]
    for hit in range(0, end + 1, 16):
        best = max((tokens for tokens in plan if tokens <= hit), default=0)
        assert hit - best <= rule.ladder.max_loss_tokens(hit)


def test_message_starts_come_from_the_settings_or_the_tokenizer() -> None:
    def no_tokenizer() -> object:
        raise OSError("gone")

    assert message_start_ids(KvConfig(message_start_token_ids=(7, 9)), no_tokenizer) == {7, 9}
    assert message_start_ids(KvConfig(message_start_token_ids=()), no_tokenizer) == frozenset()
    assert message_start_ids(KvConfig(), no_tokenizer) == frozenset()
    assert message_start_ids(KvConfig(), lambda: None) == frozenset()
    assert message_start_ids(KvConfig(), lambda: SimpleNamespace()) == frozenset()
    without = KvConfig(classes=("turn_end",))
    assert message_start_ids(without, no_tokenizer) == frozenset()
