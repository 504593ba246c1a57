# SPDX-License-Identifier: Apache-2.0
"""What the KV feature on SGLang tells of each request's hit."""

from __future__ import annotations

from mimo_plugin.engines.sglang.kv.accounting import NO_CHECKPOINT, Accounting

PAGE_TOKENS = 16


class Request:
    """What the accounting reads of SGLang's request."""

    def __init__(self, tokens: int) -> None:
        self.origin_input_ids = range(tokens)
        self.output_ids: list[int] = []


class Evicted:
    """What SGLang says of an eviction."""

    num_tokens_evicted = 64
    swa_num_tokens_evicted = 160


def counted(accounting: Accounting) -> dict[tuple[str, ...], float]:
    payload = accounting.buffer.drain() or {}
    return {(name, *labels): value for name, labels, value in payload.get("inc", ())}


def test_b53_joint_hit_and_what_was_lost_are_told_apart():
    accounting = Accounting(None, PAGE_TOKENS)
    request = Request(5000)
    accounting.matched(request, 4096)
    assert accounting.admitted(request, 1024)
    assert counted(accounting) == {
        ("prompt_lookup_tokens",): 5000,
        ("full_hit_tokens",): 4096,
        ("window_safe_hit_tokens",): 1024,
        ("trimmed_tokens", NO_CHECKPOINT): 3072,
    }


def test_a_request_counts_once_with_its_last_look_up():
    accounting = Accounting(None, PAGE_TOKENS)
    request, other = Request(200), Request(50)
    accounting.matched(request, 32)
    accounting.matched(request, 96)
    assert accounting.admitted(request, 96)
    assert not accounting.admitted(request, 96)
    assert not accounting.admitted(other, 0), "it was never looked up"
    assert counted(accounting) == {
        ("prompt_lookup_tokens",): 200,
        ("full_hit_tokens",): 96,
        ("window_safe_hit_tokens",): 96,
    }


def test_evictions_are_counted_in_pages_by_kind():
    accounting = Accounting(None, PAGE_TOKENS)
    accounting.evicted(Evicted())
    assert counted(accounting) == {
        ("evicted_blocks", "full", "none"): 4,
        ("evicted_blocks", "swa", "none"): 10,
    }
