# SPDX-License-Identifier: Apache-2.0
"""What SGLang publishes and says, as recorded from 0.5.23."""

from __future__ import annotations

import msgspec
import pytest

from mimo_plugin.core.block_hashes import PromptHasher, block_hashes
from mimo_plugin.core.engine_events import EngineStored
from mimo_plugin.core.kv_events import AllBlocksCleared, BlockRemoved, Step
from mimo_plugin.core.lookups import Lookups
from mimo_plugin.core.sglang_names import block_tokens_of
from mimo_plugin.router.event_wire import PayloadError
from mimo_plugin.router.prompt import Prompt
from mimo_plugin.router.sglang_events import decode, retention_rule, sglang_cache, sglang_sizes

PAGE = 16
TOKENS = [*range(300, 300 + 4 * PAGE)]
STORED = {
    "type": "BlockStored",
    "block_hashes": [3462680743147938443, -5288186135946772875],
    "parent_block_hash": None,
    "token_ids": TOKENS[: 2 * PAGE],
    "block_size": PAGE,
    "lora_id": None,
    "medium": "GPU",
}
FURTHER = {
    **STORED,
    "block_hashes": [7311120994477801860],
    "parent_block_hash": -5288186135946772875,
    "token_ids": TOKENS[2 * PAGE : 3 * PAGE],
}


def payload(*events, rank=0):
    return msgspec.msgpack.encode([1796075230.5, list(events), rank])


def test_a_recorded_batch():
    removed = {"type": "BlockRemoved", "block_hashes": [7311120994477801860], "medium": "GPU"}
    events, unknown = decode(
        payload(STORED, FURTHER, removed, {"type": "AllBlocksCleared"}, {"type": "Later", "x": 1})
    )
    first, second, third, last = events
    assert isinstance(first, EngineStored)
    assert (first.block_hashes, first.token_ids) == (STORED["block_hashes"], TOKENS[: 2 * PAGE])
    assert (second.parent_block_hash, second.medium) == (-5288186135946772875, "GPU")
    assert third == BlockRemoved([7311120994477801860], None, "GPU")
    assert last == AllBlocksCleared()
    assert unknown == 1


def test_salt_adapter_and_pairs():
    pairs = [[token, token + 1] for token in TOKENS[: 2 * PAGE]]
    wire = {**STORED, "token_ids": pairs, "cache_salt": "s", "lora_name": "l", "session_id": "x"}
    (event,), _ = decode(payload(wire))
    assert event.token_ids == TOKENS[: 2 * PAGE]
    assert (event.extra_keys, event.lora_name) == ([("s",)], "l")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"nonsense", msgspec.msgpack.encode([1.0]), payload({"type": 5}), payload("x")],
)
def test_anything_else_is_refused(data):
    with pytest.raises(PayloadError):
        decode(data)


def lookups_for(told=True, **info):
    lookups = Lookups(PAGE)
    cache = sglang_cache(sglang_sizes(SERVER_INFO | info), PAGE, told=told, window_tokens=128)
    index = lookups.add_approximate("w", cache, block_tokens=PAGE, window_tokens=128)
    return lookups, index


SERVER_INFO = {
    "version": "0.5.23",
    "page_size": 16,
    "chunked_prefill_size": 512,
    "max_total_num_tokens": 4096,
    "enable_hierarchical_cache": False,
    "hicache_ratio": 2.0,
    "radix_cache_backend": None,
    "internal_states": [
        {"memory_usage": {"token_capacity": 4096, "token_capacity_swa": 2048}},
        {"memory_usage": {"token_capacity": 8192, "token_capacity_swa": 1024}},
    ],
}


def test_from_the_wire_to_a_look_up():
    lookups, index = lookups_for()
    hashes = PromptHasher(PAGE).hashes(Prompt(TOKENS, len(TOKENS)))
    assert index.apply("w", 0, decode(payload(STORED))[0]) is Step.APPLY
    # One batch is missing: nothing is applied, and no page gets a name, before it is here.
    assert index.apply("w", 2, decode(payload({**FURTHER, "parent_block_hash": 1}))[0]) is Step.GAP
    assert lookups.prefixes(hashes, 64) == {}
    missing = {**FURTHER, "block_hashes": [1]}
    index.apply("w", 1, decode(payload(missing))[0], replayed=True)
    assert lookups.prefixes(hashes, 64) == {"w": 48}
    index.apply("w", 3, decode(payload({"type": "BlockRemoved", "block_hashes": [1]}))[0])
    assert lookups.prefixes(hashes, 64) == {"w": 32}
    assert lookups.lookup(hashes, 64) == {"w": 32}
    index.suspend("w")
    assert lookups.prefixes(hashes, 64) == {}
    index.resume("w")
    assert lookups.prefixes(hashes, 64) == {"w": 32}
    index.apply("w", 4, decode(payload({"type": "AllBlocksCleared"}))[0])
    assert lookups.prefixes(hashes, 64) == {} and index.blocks_of("w") == 0


def test_a_copy_on_the_host_counts_until_it_is_gone():
    lookups, index = lookups_for()
    hashes = block_hashes(TOKENS, PAGE)
    host = {**STORED, "medium": "CPU_PINNED"}
    gone = {"type": "BlockRemoved", "block_hashes": STORED["block_hashes"]}
    index.apply("w", 0, decode(payload(STORED, host, {**gone, "medium": "GPU"}))[0])
    assert lookups.prefixes(hashes, 64) == {"w": 32}
    index.apply("w", 1, decode(payload({**gone, "medium": "CPU_PINNED"}))[0])
    assert lookups.prefixes(hashes, 64) == {}


def test_a_restored_worker_goes_on_with_its_names():
    _, index = lookups_for()
    index.apply("w", 0, decode(payload(STORED))[0])
    other, restored = lookups_for()
    restored.restore_named("w", index.named_snapshot("w"))
    hashes = block_hashes(TOKENS, PAGE)
    assert other.lookup(hashes, 64) == {"w": 32}
    restored.apply("w", 1, decode(payload(FURTHER))[0])
    assert other.lookup(hashes, 64) == {"w": 48}


def test_keys_of_media_leave_the_text_before_them():
    lookups, index = lookups_for()
    media = {**FURTHER, "token_ids": [1_000_000 + (7 << 40)] * PAGE}
    index.apply("w", 0, decode(payload(STORED, media))[0])
    assert lookups.prefixes(block_hashes(TOKENS, PAGE), 64) == {"w": 32}
    assert index.name_counts("w").unknown_parents == 1


def cache_of(info, *, rank=0, told=True, window_tokens=128):
    return sglang_cache(sglang_sizes(info, rank), PAGE, told=told, window_tokens=window_tokens)


def test_what_a_worker_says_of_itself():
    cache = cache_of(SERVER_INFO)
    assert (cache.told, cache.capacity_tokens, cache.window_capacity_tokens) == (True, 4096, 2048)
    assert (cache.chunk_tokens, cache.rule) == (512, None)
    second = cache_of(SERVER_INFO, told=False, window_tokens=None, rank=1)
    assert (second.capacity_tokens, second.window_capacity_tokens) == (8192, 1024)
    host = cache_of(SERVER_INFO | {"enable_hierarchical_cache": True})
    assert (host.capacity_tokens, host.window_capacity_tokens) == (3 * 4096, 3 * 2048)
    plugin = cache_of(SERVER_INFO | {"radix_cache_backend": "mimo"})
    assert plugin.rule == retention_rule(128, 16)
    assert sglang_sizes(SERVER_INFO).page_tokens == 16


@pytest.mark.parametrize(
    "info", [{}, {"internal_states": [None]}, {"internal_states": [{"memory_usage": 3}]}]
)
def test_what_is_not_said_is_not_known(info):
    assert sglang_sizes(info | {"chunked_prefill_size": -1}) == sglang_sizes({})
    assert cache_of({}, told=False).capacity_tokens is None


@pytest.mark.parametrize(("page", "block"), [(1, 16), (8, 16), (16, 16), (64, 64)])
def test_pages_of_other_sizes(page, block):
    assert block_tokens_of(page, PAGE) == block
