# SPDX-License-Identifier: Apache-2.0
"""Draft lengths in vLLM's own schedulers: stock when off, cut when on; no request stands still."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.config import MtpConfig
from mimo_plugin.engines.vllm.kv.settings import KvSettings
from mimo_plugin.engines.vllm.mtp.lengths import (
    MtpSettings,
    extended,
    install,
    resolve_mtp_settings,
)
from mimo_plugin.engines.vllm.sched.install import install as install_queue
from tests.mtp.harness import BASES, FIXED_S, FULL, HYBRID, AsyncScheduler, Engine, K, Scheduler
from tests.sched.harness import sched_settings, snapshot, unique

ADAPTIVE = MtpSettings(adaptive_length=True)
#: crossing 4 <-> 5 requests switches between two drafts and none
SWITCH = ((1, 4, 2), (5, 512, 0))
CASES = [(Scheduler, 1), (AsyncScheduler, 1), (AsyncScheduler, 2)]
by_case = pytest.mark.parametrize(("base", "depth"), CASES)


def none_right(request_id: str, drafts: int, index: int) -> int:
    """A draft that is always wrong."""
    return 0


def told(output: Any) -> dict[str, Any]:
    """All that a ``SchedulerOutput`` tells the workers, drafts included."""
    return {
        **snapshot(output),
        "drafts": dict(output.scheduled_spec_decode_tokens),
        "asked": output.num_spec_tokens_to_schedule,
    }


def some_right(seed: int):
    """Acceptance that a seed decides, the same for every engine that asks in the same order."""

    def accepts(request_id: str, drafts: int, index: int) -> int:
        draw = random.Random(f"{seed}:{request_id}:{index}")
        count = 0
        while count < drafts and draw.random() < 0.6:
            count += 1
        return count

    return accepts


# --- stock behaviour ------------------------------------------------------------------------

_OPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive"] * 4 + ["step"] * 9 + ["abort", "preempt-all", "again"]),
        st.integers(0, 9),
        st.integers(1, 200),
    ),
    min_size=10,
    max_size=60,
)


def play(engines: list[Engine], ops: list[tuple[str, int, int]]) -> set[str]:
    """The same operations on each engine, whose steps must be equal; the aborted ids."""
    aborted: set[str] = set()

    def step() -> None:
        first, *rest = [told(engine.step()) for engine in engines]
        assert all(other == first for other in rest)

    for name, which, amount in ops:
        known = engines[0].known
        if name == "arrive":
            for engine in engines:
                engine.submit(
                    unique(1 + which % 3, 40 * (which % 4)) + unique(90, amount), 3 * which + 1
                )
        elif name == "again" and known:
            # A prompt that is all cached but its last token is padded to the size of a decode.
            prompt = list(known[f"r{which % len(known)}"].prompt_token_ids)
            for engine in engines:
                engine.submit(prompt, 5)
        elif name == "abort" and known:
            request_id = f"r{which % len(known)}"
            if not known[request_id].is_finished():
                aborted.add(request_id)
            for engine in engines:
                engine.abort(request_id)
        elif name == "preempt-all":
            for engine in engines:
                engine.preempt_all()
        elif name == "step":
            step()
    for _ in range(3000):
        if not engines[0].scheduler.has_unfinished_requests():
            break
        step()
    for engine in engines:
        engine.run()
    return aborted


@by_case
@pytest.mark.parametrize("shape", ["full", "small-pool", "hybrid-kv", "schedule"])
@settings(max_examples=15)
@given(ops=_OPS, seed=st.integers(0, 99))
def test_without_adaptive_length_every_step_equals_stock(base, depth, shape, ops, seed):
    kwargs = {
        "full": {"geometry": FULL},
        "small-pool": {"geometry": FULL, "blocks": 44},
        "hybrid-kv": {"geometry": HYBRID, "blocks": 120, "kv": KvSettings()},
        "schedule": {"geometry": FULL, "schedule": SWITCH},
    }[shape]
    common = {"base": base, "depth": depth, "accepts": some_right(seed), **kwargs}
    engines = [Engine(None, **common), Engine(MtpSettings(limit_tokens=8000), **common)]
    aborted = play(engines, ops)
    engines[1].check_outputs(but=tuple(aborted))


@pytest.mark.parametrize("base", BASES)
def test_the_class_is_extended_once_and_only_where_the_feature_is_on(base):
    assert extended(extended(base)) is extended(base) and issubclass(extended(base), base)
    without = Engine(None, base=base, kv=KvSettings(), geometry=HYBRID)
    assert not hasattr(without.scheduler, "draft_control")
    engine = Engine(MtpSettings(), base=base)
    before = type(engine.scheduler)
    assert isinstance(engine.scheduler, base) and before is not type(without.scheduler)
    install(engine.scheduler, MtpSettings(adaptive_length=True))
    assert type(engine.scheduler) is before


@by_case
def test_beside_the_other_features(base, depth):
    """The affinity queue and the plugin's KV cache manager work on below."""
    engine = Engine(ADAPTIVE, base=base, depth=depth, geometry=HYBRID, blocks=90, kv=KvSettings())
    install_queue(engine.scheduler, sched_settings())
    for i in range(30):
        engine.submit(unique(1, 100) + unique(2 + i % 5, 20 + i), 30)
    engine.run()
    engine.check_outputs()
    assert engine.total("mtp_drafted_tokens") == engine.proposed > 0
    names = {key[0] for key in engine._inc}
    assert {"scheduler_admissions", "prompt_lookup_tokens"} <= names


def test_install_wants_an_idle_scheduler():
    engine = Engine(MtpSettings())
    engine.submit(unique(1, 20), 4)
    with pytest.raises(ValueError, match="1 requests are there"):
        install(engine.scheduler, MtpSettings())


# --- adaptive length ------------------------------------------------------------------------


def lengths_of(engine: Engine, steps: int) -> list[int]:
    """Verified lengths of the last steps, a request each."""
    return [n for step in engine.verified_lengths[-steps:] for n in step.values()]


@by_case
def test_a_hopeless_draft_is_given_up_and_probed_again(base, depth):
    engine = Engine(ADAPTIVE, base=base, depth=depth, accepts=none_right, blocks=8000)
    for i in range(12):
        engine.submit(unique(i + 1, 30), 2500)
    for _ in range(400):
        engine.step()
    assert lengths_of(engine, 60).count(0) >= 0.9 * len(lengths_of(engine, 60))
    probed = [step for step in engine.verified_lengths[-200:] if any(step.values())]
    assert 2 <= len(probed) <= 0.02 * 200 + 1
    # The text becomes predictable: a probe notices, and drafts grow again.
    engine.accepts = lambda request_id, drafts, index: drafts
    for _ in range(400):
        engine.step()
    assert set(engine.verified_lengths[-1].values()) == {K}
    engine.run()
    engine.check_outputs()


@by_case
def test_a_good_draft_stays_whole(base, depth):
    engine = Engine(ADAPTIVE, base=base, depth=depth)
    for i in range(6):
        engine.submit(unique(i + 1, 30), 1500)
    engine.run()
    late = [n for step in engine.verified_lengths[200:] for n in step.values()]
    assert late.count(K) >= 0.95 * len(late)
    engine.check_outputs()


@by_case
def test_only_the_first_position_is_worth_it(base, depth):
    """With costly tokens and one good position the engine settles on drafts of one."""

    def first_only(request_id: str, drafts: int, index: int) -> int:
        return min(drafts, 1)

    engine = Engine(
        ADAPTIVE,
        base=base,
        depth=depth,
        accepts=first_only,
        blocks=2000,
        step_s=lambda tokens, shape: 5e-3 + 0.5e-3 * tokens,
    )
    for i in range(8):
        engine.submit(unique(i + 1, 30), 1200)
    for _ in range(500):
        engine.step()
    late = lengths_of(engine, 100)
    assert late.count(1) >= 0.9 * len(late)
    # A step lasts from the end of the one before it, however many are under way.
    cost = engine.scheduler.draft_control.planner.times.cost()
    for length in (0, 1, K):
        tokens = 8 * (1 + length)
        assert cost.time_s(tokens, length) == pytest.approx(5e-3 + 0.5e-3 * tokens, rel=0.1)


@by_case
def test_a_slow_shape_is_left(base, depth):
    """Lengths for which the engine has no graph cost more than their tokens: they aren't used."""

    def step_s(tokens: int, shape: int | None) -> float:
        return (FIXED_S + 0.1e-3 * tokens) * (1.0 if shape in (0, K) else 1.9)

    def first_only(request_id: str, drafts: int, index: int) -> int:
        return min(drafts, 1)

    engine = Engine(
        ADAPTIVE, base=base, depth=depth, accepts=first_only, blocks=2000, step_s=step_s
    )
    for i in range(12):
        engine.submit(unique(i + 1, 30), 1200)
    for _ in range(500):
        engine.step()
    late = lengths_of(engine, 100)
    assert late.count(K) >= 0.9 * len(late)


@by_case
def test_requests_get_their_own_lengths_where_that_pays(base, depth):
    """Half of the requests can't be predicted at all, the others for two tokens."""

    def half(request_id: str, drafts: int, index: int) -> int:
        return min(drafts, 2) if int(request_id[1:]) % 2 else 0

    engine = Engine(
        ADAPTIVE,
        base=base,
        depth=depth,
        accepts=half,
        blocks=4000,
        step_s=lambda tokens, shape: 6e-3 + 1e-3 * tokens,
    )
    for i in range(12):
        engine.submit(unique(i + 1, 30), 2000 if i % 2 else 500)
    for _ in range(300):
        output = engine.step()
    last = engine.verified_lengths[-1]
    assert output.num_spec_tokens_to_schedule == 2
    assert {n for name, n in last.items() if int(name[1:]) % 2} == {2}
    assert {n for name, n in last.items() if not int(name[1:]) % 2} == {0}


@by_case
def test_the_user_s_schedule_stays_the_upper_bound(base, depth):
    engine = Engine(ADAPTIVE, base=base, depth=depth, schedule=((1, 2, 3), (3, 512, 1)))
    for i in range(5):
        engine.submit(unique(i + 1, 30), 40 + 60 * i)
    while engine.scheduler.has_unfinished_requests():
        output = engine.step()
        alive = len(output.num_scheduled_tokens)
        if alive:
            assert output.num_spec_tokens_to_schedule <= (3 if alive <= 2 else 1)
    engine.run()
    engine.check_outputs()


@by_case
@pytest.mark.parametrize("adaptive", [False, True])
def test_crossing_the_schedule_s_threshold_stalls_nobody(base, depth, adaptive):
    """B36: four requests draft two tokens, five none; every request runs in every step."""
    engine = Engine(MtpSettings(adaptive_length=adaptive), base=base, depth=depth, schedule=SWITCH)
    long = [engine.submit(unique(i + 1, 30), 400) for i in range(4)]
    for _ in range(4):
        engine.step()
    asked = []
    for round_ in range(12):
        guest = engine.submit(unique(50 + round_, 20), 8)
        for _ in range(14):
            output = engine.step()
            asked.append((len(output.num_scheduled_tokens), output.num_spec_tokens_to_schedule))
            for name in (*long, guest):
                if engine.scheduler.requests.get(name) in engine.scheduler.running:
                    ending = depth == 2 and name == guest
                    assert output.num_scheduled_tokens.get(name) or ending, name
    assert {n for alive, n in asked if alive >= 5} == {0}
    if not adaptive:
        assert {n for alive, n in asked if alive == 4} == {2}
    engine.run()
    engine.check_outputs()


# --- length limit ---------------------------------------------------------------------------


@by_case
@pytest.mark.parametrize("adaptive", [False, True])
def test_drafting_stops_at_the_limit_and_serving_goes_on(base, depth, adaptive):
    limit = 100
    engine = Engine(
        MtpSettings(adaptive_length=adaptive, limit_tokens=limit), base=base, depth=depth
    )
    name = engine.submit(unique(1, 60), 120)
    short = engine.submit(unique(2, 20), 90)
    request = engine.known[name]
    reached = 0
    while engine.scheduler.has_unfinished_requests():
        output = engine.schedule()
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        # With steps ahead the tokens under way are not known yet; the drafts are the last of them.
        if drafts:
            assert request.num_computed_tokens <= limit
            reached = max(reached, request.num_computed_tokens)
        while len(engine._flying) >= depth:
            engine.update()
    engine.run()
    assert reached > limit - 2 * (K + 1) * depth, "drafting stopped long before the limit"
    assert request.num_tokens == 180
    engine.check_outputs()
    assert engine.known[short].num_tokens == 110


def test_the_limit_comes_from_the_draft_s_config():
    def config(**kwargs: Any) -> Any:
        hf = SimpleNamespace(max_position_embeddings=kwargs.pop("positions", 10_000))
        draft = SimpleNamespace(max_model_len=kwargs.pop("draft_len", 8192), hf_config=hf)
        spec = SimpleNamespace(
            method=kwargs.pop("method", "mtp"),
            max_model_len=kwargs.pop("spec_len", None),
            draft_model_config=draft,
        )
        return SimpleNamespace(
            speculative_config=spec,
            model_config=SimpleNamespace(max_model_len=8192),
            parallel_config=SimpleNamespace(data_parallel_size=1),
        )

    def limit(**kwargs: Any) -> int | None:
        return resolve_mtp_settings(MtpConfig(), config(**kwargs)).limit_tokens

    assert limit() is None
    assert limit(spec_len=500) == 500
    assert limit(positions=4096) == 4096
    assert limit(draft_len=2048) == 2048
    assert limit(positions=None) is None
    settings_ = resolve_mtp_settings(MtpConfig(warn_after_drafts=7, adaptive_length=True), config())
    assert settings_ == MtpSettings(adaptive_length=True, warn_after_drafts=7)
    assert resolve_mtp_settings(MtpConfig(), config(method="ngram")) is None
    nothing = SimpleNamespace(speculative_config=None)
    assert resolve_mtp_settings(MtpConfig(), nothing) is None
    real = Engine(None).config
    assert resolve_mtp_settings(MtpConfig(), real) == MtpSettings()


def test_lengths_are_not_adapted_where_ranks_share_the_shape_of_a_step(caplog):
    config = copy.copy(Engine(None).config)
    wanted = MtpConfig(adaptive_length=True)
    assert resolve_mtp_settings(wanted, config) == MtpSettings(adaptive_length=True)
    assert not caplog.records
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.data_parallel_size = 2
    assert resolve_mtp_settings(wanted, config) == MtpSettings()
    (record,) = caplog.records
    assert "found --data-parallel-size 2" in record.getMessage()


# --- any history ----------------------------------------------------------------------------


@by_case
@settings(max_examples=20)
@given(
    ops=_OPS,
    seed=st.integers(0, 99),
    blocks=st.sampled_from([44, 60, 400]),
    limit=st.sampled_from([None, 60, 150]),
    schedule=st.sampled_from([None, SWITCH]),
    adaptive=st.booleans(),
    budget=st.sampled_from([18, 256]),
)
def test_any_history_is_served_and_adds_up(
    base, depth, ops, seed, blocks, limit, schedule, adaptive, budget
):
    engine = Engine(
        MtpSettings(adaptive_length=adaptive, limit_tokens=limit),
        base=base,
        depth=depth,
        accepts=some_right(seed),
        blocks=blocks,
        schedule=schedule,
        max_batched_tokens=budget,
    )
    aborted = play([engine], ops)
    engine.check_outputs(but=tuple(aborted))
    control = engine.scheduler.draft_control
    drafted, accepted = engine.total("mtp_drafted_tokens"), engine.total("mtp_accepted_tokens")
    assert drafted == accepted + engine.total("mtp_wasted_drafts") == engine.proposed
    assert accepted == engine.stock_accepted
    assert not control._states and not control._steps, "something of an ended request is left"
