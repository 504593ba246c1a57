# SPDX-License-Identifier: Apache-2.0
"""Reported failures of hybrid prefix caching, each with the right value, without a model.

Named after the rows of the project's case collection. Where a row gives stock's value too, stock
is run beside the plugin, so that a change of the engine is noticed.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.sim import PLUGIN, Geometry, Simulator
from benchmarks.workloads import MESSAGE_START, message, tokens
from mimo_plugin.core.retention import TAIL
from mimo_plugin.engines.vllm.kv.fit import why_groups_do_not_fit, why_not
from mimo_plugin.engines.vllm.kv.settings import KvSettings
from tests.kv.harness import Group, KvHarness, full, group_specs, swa, unique_tokens
from tests.published_models import MIMO_V2_FLASH

FULL64 = (full(64), swa(64, 128))


def ours(groups: tuple[Group, ...], blocks: int, **kwargs: Any) -> KvHarness:
    settings = KvSettings(message_start_token_ids=frozenset({MESSAGE_START}))
    return KvHarness(groups, blocks, plugin=kwargs.pop("settings", settings), **kwargs)


# -- prefix match --------------------------------------------------------------------------------


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("output_tokens", [0, 1, 70])
def test_b01_prompt_edited_in_its_last_block(eagle: bool, output_tokens: int) -> None:
    for length in range(256, 385):
        kv = ours(FULL64, 64, use_eagle=eagle)
        first = unique_tokens(1000, length)
        kv.run(first, unique_tokens(7000, output_tokens))
        hit = kv.run(first[:-10] + unique_tokens(5000, 40))
        common = (length - 10) // 64 * 64
        assert hit == common - (64 if eagle else 0), length
        if (length, eagle) in {(321, False): 0, (257, False): 0}:
            assert hit == {321: 256, 257: 192}[length]


def test_b01_stock_loses_everything() -> None:
    """If this fails the engine has mended it, and the patch for it can go."""
    kv = KvHarness(FULL64, 64)
    first = unique_tokens(1000, 321)
    kv.run(first)
    assert kv.run(first[:-10] + unique_tokens(5000, 40)) == 0


@pytest.mark.parametrize(("eagle", "right"), [(True, 768), (False, 1024)])
def test_b05_alignment_larger_than_the_window(eagle: bool, right: int) -> None:
    kv = ours((full(256), swa(64, 128)), 200, use_eagle=eagle)
    first = unique_tokens(1000, 1024)
    kv.run(first)
    assert kv.run(first + unique_tokens(5000, 300)) == right


B07_ROWS = {
    True: [4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14],
    False: [4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14],
}


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("plugin", [False, True])
def test_b07_rows_of_block_2_window_4(eagle: bool, plugin: bool) -> None:
    row = []
    for length in range(6, 17):
        groups = (full(2), swa(2, 4))
        kv = ours(groups, 64, use_eagle=eagle) if plugin else KvHarness(groups, 64, use_eagle=eagle)
        prompt = unique_tokens(100, length)
        kv.run(prompt)
        request = kv.request(prompt)
        blocks, hit, _ = kv.look_up(request)
        row.append(hit)
        assert kv.is_valid(request, hit)
        kv.check_contents(request, blocks, hit)
    assert row == B07_ROWS[eagle]


def test_b09_four_block_sizes_long_lanes() -> None:
    """Eight lanes of 32K in parallel, then again: reuse, with every SWA group in the minimum."""
    groups = (full(256), swa(64, 128), swa(4, 16), swa(8, 128))
    kv = ours(groups, 9000, max_in_flight_tokens=4096)
    prompts = [unique_tokens(100_000 * (i + 1), 32_768) for i in range(8)]
    lanes = [kv.request(p) for p in prompts]
    for lane in lanes:
        assert kv.admit(lane, 2048) == 0
    while any(r.num_computed_tokens < r.num_tokens for r in lanes):
        for lane in lanes:
            assert kv.step(lane, 2048)
    for lane in lanes:
        kv.finish(lane)
    for prompt in prompts:
        request = kv.request(prompt)
        blocks, hit, _ = kv.look_up(request)
        assert hit == 32_512
        assert kv.is_valid(request, hit)
        kv.check_contents(request, blocks, hit)
        # Without its windows in one SWA group the hit is gone: no group is left out.
        assert all(kv.resident(request, g, hit // b - 1) for g, b in enumerate((256, 64, 4, 8)))
    request = kv.request(prompts[0])
    blocks, hit, _ = kv.look_up(request)
    kv.manager.evict_blocks({blocks.blocks[2][hit // 4 - 1].block_id})
    assert kv.look_up(request)[1] < hit


@pytest.mark.parametrize("draft", [False, True])
def test_b55_eagle_with_unequal_block_sizes(draft: bool) -> None:
    groups = (full(32), swa(16, 128), swa(16, 64, draft=draft))
    kv = ours(groups, 400, use_eagle=True)
    for length in range(150, 190):
        first = unique_tokens(1000 * length, length)
        kv.run(first, unique_tokens(5_000_000 + 1000 * length, 20))
        hit = kv.run(first + unique_tokens(9_000_000 + 1000 * length, 50))
        assert hit > 0
        assert hit % 32 == 0


def test_b56_finer_match_unit_is_refused_at_start() -> None:
    reason = why_not(fake_config(prefix_match_unit=16))
    assert reason is not None
    assert "--prefix-match-unit" in reason
    assert "16" in reason


def test_b59_reuse_reads_what_a_cold_run_would_have_written() -> None:
    """The harness reads every block a step attends to and compares it with the tokens' own KV."""
    kv = ours((full(32), swa(16, 128), swa(16, 128)), 300)
    shared = unique_tokens(1000, 640)
    kv.run(shared + unique_tokens(5000, 50), unique_tokens(6000, 300))
    assert kv.run(shared + unique_tokens(7000, 50), unique_tokens(8000, 300)) <= 640
    assert kv.run(shared + unique_tokens(9000, 50), unique_tokens(9500, 300)) == 640


# -- retention -----------------------------------------------------------------------------------


def test_b02_sessions_in_rotation() -> None:
    geometry = Geometry(swa_groups=5, window_tokens=1024)
    sim = Simulator(4000, plugin=PLUGIN, geometry=geometry)
    rng = random.Random(2)
    contexts = [tokens(rng, 8000) for _ in range(4)]
    rows: list[list[int]] = []
    for _ in range(3):
        row = []
        for index, context in enumerate(contexts):
            record, _ = sim.generate(context, 1)
            row.append(record.hit_tokens)
            contexts[index] = context + tokens(rng, 40)
        rows.append(row)
    assert rows[0] == [0] * 4
    assert all(7968 <= hit <= 8000 for hit in rows[1]), rows[1]
    assert rows[2] == [8032] * 4


@pytest.mark.parametrize("declared", [False, True])
def test_b03_shared_system_prompt(declared: bool) -> None:
    kv = ours(FULL64, 400)
    common = unique_tokens(10_000, 2048)
    hits = []
    for user in range(5):
        private = unique_tokens(20_000 + 1000 * user, 500)
        if declared:
            private[0] = MESSAGE_START
        hits.append(kv.run(common + private))
    assert hits[0] == 0
    assert hits[2:] == [2048] * 3
    if declared:
        assert hits[1] == 2048


def test_b03_stock_needs_three_users() -> None:
    kv = KvHarness(FULL64, 400)
    common = unique_tokens(10_000, 2048)
    hits = [kv.run(common + unique_tokens(20_000 + 1000 * u, 500)) for u in range(4)]
    assert hits == [0, 0, 2048, 2048]


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_b08_share_of_the_draft_group(share: float) -> None:
    """Blocks that the draft model's group holds of the SWA budget, after 120K tokens."""
    groups = (full(32), *[swa(16, 128) for _ in range(6)], swa(16, 2048, draft=True))
    settings = KvSettings(message_start_token_ids=frozenset({MESSAGE_START}), draft_share=share)
    kv = ours(groups, 12_000, use_eagle=True, settings=settings)
    for index in range(15):
        kv.run(unique_tokens(10_000 * (index + 1), 8000), chunk_tokens=2048)
    cached = kv.cached_by_group()
    assert cached[7] > 0
    # Blocks that wait to be reused still carry a hash: at most those of one checkpoint.
    assert cached[7] <= share * settings.swa_share * 12_000 + 129, cached


# -- eviction ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blocks",
    [1600, 2400, 4000],
)
def test_b10_an_idle_branch_keeps_its_last_safe_point(blocks: int) -> None:
    """While short requests churn, a long idle branch loses both kinds of KV together or none."""
    sim = Simulator(blocks, plugin=PLUGIN)
    rng = random.Random(10)
    branch = message(rng, 16_000)
    _, output = sim.generate(branch, 64)
    branch += output
    probe = [*branch, *message(rng, 64)]
    hits = []
    for _ in range(40):
        sim.generate(message(rng, 700), 8)
        hit, full_hit = peek(sim, probe)
        hits.append(hit)
        assert full_hit - hit <= max(4000, full_hit // 4), (hit, full_hit)
        assert hit > 0 or full_hit <= 4000
    assert hits[0] == len(branch) // 32 * 32 or hits[0] == (len(branch) - 1) // 32 * 32


# -- hybrid manager, start-up --------------------------------------------------------------------


def fake_config(
    *, connector: str | None = None, hybrid_off: bool = False, prefix_match_unit: int | None = None
) -> Any:
    text = SimpleNamespace(to_dict=lambda: dict(MIMO_V2_FLASH))
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, prefix_match_unit=prefix_match_unit
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=hybrid_off),
        kv_transfer_config=SimpleNamespace(kv_connector=connector) if connector else None,
        model_config=SimpleNamespace(hf_text_config=text, hf_config=text),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
    )


def test_b13_a_connector_that_turns_the_hybrid_manager_off_is_named() -> None:
    assert why_not(fake_config()) is None
    assert why_not(fake_config(connector="OffloadingConnector")) is None
    reason = why_not(fake_config(connector="SharedStorageConnector", hybrid_off=True))
    assert reason is not None
    assert "SharedStorageConnector" in reason
    assert "hybrid" in reason
    assert "\n" not in reason
    by_option = why_not(fake_config(hybrid_off=True))
    assert by_option is not None
    assert "--disable-hybrid-kv-cache-manager" in by_option


def test_b13_groups_must_be_of_both_kinds() -> None:
    assert why_groups_do_not_fit(group_specs((full(32), swa(16, 128)))) is None
    assert why_groups_do_not_fit(group_specs((full(32),))) is not None
    assert why_groups_do_not_fit(group_specs((swa(16, 128),))) is not None


# -- observability -------------------------------------------------------------------------------


def counters(payload: dict[str, Any] | None) -> dict[tuple[str, ...], float]:
    out: dict[tuple[str, ...], float] = {}
    for name, labels, value in (payload or {"inc": []})["inc"]:
        out[(name, *labels)] = out.get((name, *labels), 0) + value
    return out


def test_b53_full_hit_window_safe_hit_and_trim() -> None:
    settings = KvSettings(classes=("boundary",), message_start_token_ids=frozenset({MESSAGE_START}))
    sim = Simulator(2000, plugin=settings)
    rng = random.Random(53)
    prompt = [*tokens(rng, 1024), *message(rng, 3072), *tokens(rng, 20)]
    # Still running: the KV of what has ended is kept as far as a checkpoint reaches, no further.
    sim.submit(prompt, 500)
    for _ in range(10):
        sim.step()
    sim.manager.accounting.drain()
    record, _ = sim.generate([*prompt[:4096], *tokens(rng, 100)], 4)
    seen = counters(sim.manager.accounting.drain())
    assert record.hit_tokens == 1024
    assert seen["full_hit_tokens",] == 4096
    assert seen["window_safe_hit_tokens",] == 1024
    trimmed = {key[1]: value for key, value in seen.items() if key[0] == "trimmed_tokens"}
    assert trimmed == {"no_checkpoint": 3072}
    assert seen["prompt_lookup_tokens",] == 4196


@pytest.mark.parametrize("eagle", [False, True])
def test_b88_counters_rise_by_the_tokens_reused(eagle: bool) -> None:
    kv = ours((full(32), swa(16, 128)), 300, use_eagle=eagle)
    prompt = unique_tokens(1000, 1000)
    kv.run(prompt)
    total = 0
    kv.manager.accounting.drain()
    kv.manager.make_prefix_cache_stats()
    for tail in (0, 10, 400):
        total += kv.run(prompt + unique_tokens(50_000 + 1000 * tail, tail))
    seen = counters(kv.manager.accounting.drain())
    assert total > 2500
    assert seen["window_safe_hit_tokens",] == total
    assert kv.manager.make_prefix_cache_stats().hits == total


# -- stock's five failures -----------------------------------------------------------------------

BOTH = pytest.mark.parametrize("plugin", [PLUGIN, None], ids=["plugin", "stock"])


def peek(sim: Simulator, prompt: list[int]) -> tuple[int, int]:
    """``(hit, full-attention hit)`` that ``prompt`` would have now; nothing is computed."""
    request_id = sim.submit(prompt, 1)
    request = sim.scheduler.requests[request_id]
    _, hit, _ = sim.manager.get_computed_blocks(request)
    full_hit = sim.full_hit_tokens(request)
    from vllm.v1.request import RequestStatus

    sim.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
    return int(hit), full_hit


def right(hit: int, value: int, plugin: Any, stock: int = 0) -> None:
    """The plugin gives ``value`` or one block less; stock gives ``stock``."""
    if plugin is None:
        assert hit == stock
    else:
        assert value - 32 <= hit <= value


@BOTH
def test_stock_failure_second_user_of_a_system_prompt(plugin: Any) -> None:
    sim = Simulator(60_000, plugin=plugin)
    rng = random.Random(5)
    system = tokens(rng, 4000)
    sim.generate([*system, *message(rng, 300)], 16)
    record, _ = sim.generate([*system, *message(rng, 300)], 16)
    assert record.full_hit_tokens == 4000
    right(record.hit_tokens, 4000, plugin)


@BOTH
def test_stock_failure_turn_after_a_long_decode_under_load(plugin: Any) -> None:
    sim = Simulator(4000, plugin=plugin)
    rng = random.Random(5)
    prompt = message(rng, 6000)
    chat = sim.submit(prompt, 2500)
    done: set[str] = set()
    while chat not in done:
        if not sim.scheduler.waiting and len(sim.scheduler.running) < 3:
            sim.submit(message(rng, 1500), 8)
        done = sim.step()
    record, _ = sim.generate([*prompt, *sim.output_of(chat), *message(rng, 100)], 4)
    assert record.full_hit_tokens == 8480
    right(record.hit_tokens, 8480, plugin)


@BOTH
def test_stock_failure_new_user_after_123_turns(plugin: Any) -> None:
    sim = Simulator(6000, plugin=plugin)
    rng = random.Random(5)
    system = tokens(rng, 4000)
    chats = [[*system, *message(rng, 200)] for _ in range(3)]
    for turn in range(41):
        for index, chat in enumerate(chats):
            _, output = sim.generate(chat, 300 if turn else 100)
            chats[index] = [*chat, *output, *message(rng, 150)]
    record, _ = sim.generate([*system, *message(rng, 200)], 4)
    assert record.full_hit_tokens == 4000
    right(record.hit_tokens, 4000, plugin)


@BOTH
def test_stock_failure_preempted_in_a_long_decode(plugin: Any) -> None:
    sim = Simulator(60_000, plugin=plugin)
    rng = random.Random(5)
    request_id = sim.submit(message(rng, 3000), 4000)
    for _ in range(3003):
        sim.step()
    request = sim.scheduler.requests[request_id]
    sim.scheduler.running.remove(request)
    del sim.records[request_id]
    sim.scheduler._preempt_request(request, time.monotonic())
    sim.step()
    record = sim.records[request_id]
    assert record.full_hit_tokens == 5984
    right(record.hit_tokens, 5984, plugin, stock=2976)


@pytest.mark.parametrize(
    "plugin",
    [PLUGIN, None],
    ids=["plugin", "stock"],
)
def test_stock_failure_long_prompt_whose_tail_is_evicted(plugin: Any) -> None:
    """Cold requests push a 16K prompt out; as long as full KV is left a hit on it is left."""
    sim = Simulator(3000, plugin=plugin)
    rng = random.Random(5)
    prompt = message(rng, 16_000)
    probe = [*prompt, *message(rng, 64)]
    sim.generate(prompt, 16)
    worst = 0
    for _ in range(40):
        sim.generate(message(rng, 2000), 16)
        hit, full_hit = peek(sim, probe)
        if plugin is None:
            if full_hit < 15_900:
                assert (hit, full_hit) == (0, 12_480)
                return
        else:
            worst = max(worst, full_hit - hit)
            assert full_hit - hit <= 32, (hit, full_hit)
    assert plugin is not None, "stock kept the prompt"


# -- without pressure ----------------------------------------------------------------------------


def test_shared_system_prompt_is_hit_whole() -> None:
    sim = Simulator(60_000, plugin=PLUGIN)
    rng = random.Random(7)
    system = tokens(rng, 1984)
    hits = [sim.generate([*system, *message(rng, 200)], 32)[0].hit_tokens for _ in range(4)]
    assert hits == [0, 1984, 1984, 1984]


def test_chat_hits_reach_the_end_of_the_previous_output() -> None:
    sim = Simulator(60_000, plugin=PLUGIN)
    rng = random.Random(7)
    context = message(rng, 900)
    computed = 0
    for _ in range(8):
        record, output = sim.generate(context, 256)
        assert record.hit_tokens == computed // 32 * 32
        # The last output token is sampled, but its KV is never computed.
        computed = len(context) + len(output) - 1
        context = [*context, *output, *message(rng, 90)]


def test_turn_end_is_kept_wherever_the_output_ends() -> None:
    rng = random.Random(7)
    for length in range(32, 97):
        kv = ours((full(32), swa(16, 128)), 60)
        prompt, output = message(rng, 205), tokens(rng, length)
        kv.run(prompt, output)
        hit = kv.run([*prompt, *output, *message(rng, 40)])
        assert hit == (205 + length - 1) // 32 * 32, length


def test_forks_reach_the_oracle() -> None:
    """Continuations from every earlier message, and regenerations, resume at that message."""
    sim = Simulator(60_000, plugin=PLUGIN)
    rng = random.Random(7)
    context = message(rng, 1500)
    turns = []
    for _ in range(6):
        _, output = sim.generate(context, 200)
        turns.append(len(context))
        context = [*context, *output, *message(rng, 120)]
    for start in turns:
        again, _ = sim.generate(context[:start], 50)
        assert again.hit_tokens == again.full_hit_tokens == (start - 1) // 32 * 32
    for start in turns[1:]:
        # Another question instead of the last one before ``start``.
        fork, _ = sim.generate([*context[: start - 120], *message(rng, 130)], 50)
        assert fork.full_hit_tokens - fork.hit_tokens <= 32
        assert fork.hit_tokens >= (start - 120) // 32 * 32 - 32


def test_an_edit_of_the_tail_costs_one_block() -> None:
    sim = Simulator(60_000, plugin=PLUGIN)
    assert TAIL in PLUGIN.classes
    rng = random.Random(7)
    for length in range(2048, 2112, 7):
        prompt = message(rng, length)
        sim.generate(prompt, 8)
        record, _ = sim.generate([*prompt[:-10], *tokens(rng, 30)], 8)
        assert record.full_hit_tokens - record.hit_tokens <= 32
        assert record.hit_tokens >= (length - 10) // 32 * 32 - 32
