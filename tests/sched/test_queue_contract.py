# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler expects of its waiting queue, against both scheduler classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.v1.core.sched.interface import PauseState

from mimo_plugin.core.lanes import Lane
from tests.sched.harness import (
    BASES,
    AsyncScheduler,
    Engine,
    Request,
    RequestStatus,
    count_lookups,
    empty,
    grammar,
    grammar_request,
    sched_settings,
    unique,
)

pytestmark = pytest.mark.parametrize("base", BASES)


class Connector:
    """The parts of a KV connector that the scheduler calls; ``answers`` says what it finds.

    ``answers``: request id -> ``(tokens or None, asynchronous)``, or a list of these to be given
    one after the other.
    """

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.mock = MagicMock()
        self.supports_divergent_local_hybrid_hits = False
        self.requires_kv_delivery = False

    def get_num_new_matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        self.asked.append(request.request_id)
        answer = self.answers.get(request.request_id, (0, False))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return answer

    def has_pending_block_frees(self) -> bool:
        return False

    def has_pending_push_work(self) -> bool:
        return False

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return ()

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def take_events(self) -> tuple[()]:
        return ()

    def get_kv_connector_stats(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mock, name)


def connect(engine: Engine, answers: dict[str, Any]) -> Connector:
    """Give an engine a fake connector."""
    engine.scheduler.connector = connector = Connector(answers)
    return connector


# -- peek, pop, iterate ----------------------------------------------------------------------------


def test_peek_and_pop_name_the_same_request_within_a_step(base):
    """Whatever happens to the cache between the two."""
    engine = Engine(sched_settings(), base=base, blocks=40, max_requests=3)
    queue = engine.queue
    peeked: list[str] = []
    peek, pop = queue.peek_request, queue.pop_request

    def watched_peek() -> Any:
        first, second = peek(), peek()
        assert first is second
        peeked.append(first.request_id)
        return first

    def watched_pop() -> Any:
        before = peek()
        after = pop()
        assert after is before and after.request_id == peeked[-1]
        return after

    queue.peek_request, queue.pop_request = watched_peek, watched_pop
    for i in range(12):
        engine.submit(unique(i % 4, 100) + unique(50 + i, 20 * (i % 5)), 4)
    engine.run()
    assert len(engine.finished) == 12
    assert len(peeked) >= 12


def test_outside_of_a_step_it_is_an_ordinary_queue(base):
    engine = Engine(sched_settings(), base=base)
    queue = engine.queue
    assert not queue and len(queue) == 0 and list(queue) == []
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()
    requests = [engine.request(unique(i, 50 * (3 - i))) for i in range(3)]
    for request in requests:
        queue.add_request(request)
    assert queue and len(queue) == 3
    assert set(queue) == set(requests)
    first = queue.peek_request()
    assert queue.peek_request() is first
    assert queue.pop_request() is first
    assert len(queue) == 2 and first not in set(queue)
    queue.prepend_request(first)
    assert len(queue) == 3 and queue.peek_request() is first
    rest = list(queue)
    assert [queue.pop_request() for _ in range(3)] == rest
    empty(engine)


def test_remove(base):
    engine = Engine(sched_settings(), base=base)
    queue = engine.queue
    requests = [engine.request(unique(i, 50)) for i in range(5)]
    for request in requests:
        queue.add_request(request)
    queue.remove_request(requests[2])
    assert set(queue) == {requests[i] for i in (0, 1, 3, 4)}
    with pytest.raises(ValueError):
        queue.remove_request(requests[2])
    queue.remove_requests([requests[2], requests[0], requests[4]])
    assert set(queue) == {requests[1], requests[3]} and len(queue) == 2
    queue.remove_requests(iter(requests))
    assert not queue
    empty(engine)


def test_counts_and_stats_agree_with_each_other(base):
    """Waiting + skipped is what waits, parked and blocked ones included."""
    engine = Engine(
        sched_settings(lanes=(Lane(500, 1),)), base=base, log_stats=True, max_requests=4
    )
    for _ in range(3):
        engine.submit(unique(1, 1000), 2)  # one leader, two followers
    engine.submit(unique(2, 900), 2)  # held: the lane is full
    engine.add(grammar_request(engine, unique(3, 40)))
    for _ in range(30):
        engine.step()
        outputs = engine.engine_outputs[-1]
        stats = next(iter(outputs.values())).scheduler_stats
        running, waiting = engine.scheduler.get_request_counts()
        assert stats.num_running_reqs == running == len(engine.running)
        assert stats.num_waiting_reqs + stats.num_skipped_waiting_reqs == waiting
        assert stats.num_waiting_reqs >= 0
        assert waiting == len(engine.waiting) == len(engine.queue)
        unfinished = engine.scheduler.get_num_unfinished_requests()
        assert unfinished == running + waiting
    assert engine.waiting == ["r4"]
    engine.abort("r4")
    empty(engine)


# -- preempted -------------------------------------------------------------------------------------


def test_preempted_requests_come_first_and_in_their_old_order(base):
    engine = Engine(sched_settings(), base=base, max_requests=4)
    for i in range(4):
        engine.submit(unique(i, 60), 20)
    engine.step()
    old = engine.running
    assert len(old) == 4
    engine.submit(unique(9, 3))
    engine.submit(unique(9, 3))
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.waiting[:4] == old
    engine.step()
    assert engine.running == old
    engine.run()
    assert len(engine.finished) == 6
    assert engine.counters("scheduler_admissions")["preempted"] == 4


def test_the_last_preempted_is_resumed_first_as_in_stock(base):
    """Under FCFS the engine preempts from the end of the running list."""
    engine = Engine(sched_settings(), base=base, blocks=16, max_batched_tokens=128)
    stock = Engine(None, base=base, blocks=16, max_batched_tokens=128)
    for e in (engine, stock):
        for i in range(4):
            e.submit(unique(i, 40), 60)
        e.run()
    assert any(r.num_preemptions for r in engine.known.values())
    assert engine.started == stock.started
    empty(engine)


def test_priority_preemption_returns_to_its_priority(base):
    engine = Engine(
        sched_settings(), base=base, policy="priority", blocks=14, max_batched_tokens=128
    )
    for i, priority in enumerate((2, 0, 1)):
        engine.submit(unique(i, 40), 60, priority=priority)
    engine.run()
    assert engine.known["r0"].num_preemptions > 0
    assert engine.known["r1"].num_preemptions == 0
    assert len(engine.finished) == 3


# -- aborts ----------------------------------------------------------------------------------------


def test_aborts_of_waiting_parked_held_and_blocked_requests(base):
    engine = Engine(
        sched_settings(lanes=(Lane(500, 1),)), base=base, max_requests=4, max_batched_tokens=64
    )
    leader = engine.submit(unique(1, 1000), 2)
    engine.step()
    parked = engine.submit(unique(1, 450), 2)
    held = engine.submit(unique(2, 900), 2)
    blocked = engine.add(grammar_request(engine, unique(3, 40)))
    engine.step()  # the leader gets its share, so there is room to look at the others
    assert engine.running == [leader]
    queue = engine.queue
    assert queue.line.num_parked == 1
    assert {r.request_id for r in queue} == {parked, held, blocked}
    assert engine.known[blocked] in engine.scheduler.deferred_waiting
    engine.abort(parked, blocked)
    engine.step()
    assert engine.waiting == [held]
    engine.abort(held)
    assert engine.waiting == []
    empty(engine)
    engine.abort(leader)
    engine.step()
    assert not engine.scheduler.requests
    empty(engine)


def test_abort_of_a_leader_frees_its_followers(base):
    engine = Engine(sched_settings(lanes=(Lane(500, 4),)), base=base, max_batched_tokens=64)
    leader = engine.submit(unique(1, 1000), 2)
    engine.step()
    followers = [engine.submit(unique(1, 490), 2) for _ in range(3)]
    engine.step()
    assert engine.running == [leader]
    assert engine.queue.line.num_parked == 3
    engine.abort(leader)
    engine.step()
    assert len(engine.running) == 1, "one of them leads now"
    engine.run()
    assert set(followers) <= engine.finished
    empty(engine)


# -- structured output -----------------------------------------------------------------------------


def test_a_request_without_its_grammar_blocks_nobody_and_is_not_scored(base):
    engine = Engine(sched_settings(), base=base)
    looked_up = count_lookups(engine)
    blocked = engine.add(request := grammar_request(engine, unique(1, 30), 2))
    others = [engine.submit(unique(2 + i, 200)) for i in range(4)]
    for _ in range(10):
        engine.step()
    assert set(others) <= engine.finished
    assert blocked not in looked_up
    assert engine.waiting == [blocked]
    assert engine.scheduler.has_unfinished_requests()
    request.structured_output_request.grammar = grammar()
    engine.step()
    assert engine.running == [blocked] or blocked in engine.finished
    engine.run()
    assert blocked in engine.finished
    empty(engine)


def test_a_request_whose_grammar_became_ready_has_aged(base):
    """It goes before what arrived later and is worth the same."""
    engine = Engine(sched_settings(max_wait_s=5.0), base=base, max_requests=1)
    request = grammar_request(engine, unique(1, 200))
    blocked = engine.add(request)
    runner = engine.submit(unique(2, 50), 8)
    engine.step(seconds=10.0)
    later = engine.submit(unique(3, 10))
    request.structured_output_request.grammar = grammar()
    engine.run()
    assert engine.started == [runner, blocked, later]


def test_a_request_whose_grammar_failed_ends_in_an_error(base):
    engine = Engine(sched_settings(), base=base)
    request = grammar_request(engine, unique(1, 30))
    engine.add(request)
    ok = engine.submit(unique(2, 30), 3)
    request.structured_output_request.grammar = ValueError("no such rule")
    engine.run()
    assert request.status == RequestStatus.FINISHED_ERROR
    assert engine.known[ok].status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.started == [ok]
    empty(engine)


# -- streaming sessions ----------------------------------------------------------------------------


def test_streaming_sessions_keep_their_own_queue_and_order(base):
    """Paused sessions hold KV; they are drained first come first served, before the waiting."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    engine = Engine(sched_settings(), base=base, max_requests=6)
    assert type(engine.scheduler.kv_holding_waiting) is FCFSRequestQueue
    sessions = [
        engine.add(engine.request(unique(i, 40), 2, resumable=True, request_id=f"s{i}"))
        for i in range(3)
    ]
    for _ in range(4):
        engine.step()
    holding = engine.scheduler.kv_holding_waiting
    assert [r.request_id for r in holding] == sessions
    assert len(engine.queue) == 0
    assert all(r.status == RequestStatus.WAITING_FOR_STREAMING_REQ for r in holding)
    first_run = list(engine.started)
    # The next chunk of each, in another order than they paused; and warm, short competitors.
    for i in (2, 0, 1):
        engine.scheduler.add_request(
            engine.request(unique(10 + i, 30), 2, resumable=True, request_id=f"s{i}")
        )
    competitor = engine.submit(unique(0, 40)[:20])
    engine.step()
    assert engine.started[len(first_run) :] == [*sessions, competitor]
    for _ in range(4):
        engine.step()
    for name in sessions:
        engine.scheduler.add_request(engine.request([1], 1, resumable=False, request_id=name))
    engine.run()
    assert set(sessions) <= engine.finished | {
        n for n, r in engine.known.items() if r.is_finished()
    }
    assert engine.scheduler.num_waiting_for_streaming_input == 0
    empty(engine)


def test_aborting_a_paused_session(base):
    engine = Engine(sched_settings(), base=base)
    name = engine.add(engine.request(unique(1, 40), 1, resumable=True))
    engine.step()
    engine.step()
    engine.abort(name)
    assert not engine.scheduler.requests and len(engine.scheduler.kv_holding_waiting) == 0
    empty(engine)


# -- LoRA ------------------------------------------------------------------------------------------


def with_loras(engine: Engine, most: int) -> Engine:
    engine.scheduler.lora_config = SimpleNamespace(max_loras=most)
    return engine


def test_the_lora_limit_skips_and_keeps_the_order(base):
    settings = sched_settings(hit_weight=0.0, age_credit=1000.0)  # order of arrival
    engine = with_loras(Engine(settings, base=base, max_requests=6), 1)
    stock = with_loras(Engine(None, base=base, max_requests=6), 1)
    for e in (engine, stock):
        for i, lora in enumerate((1, 2, 1, 3, 2, None, 1)):
            e.submit(unique(i, 40), 3, lora=lora)
        e.run()
    assert engine.started == stock.started
    assert len(engine.finished) == 7
    empty(engine)


def test_skipped_requests_stay_in_place(base):
    engine = with_loras(Engine(sched_settings(), base=base, max_requests=6), 1)
    first = engine.submit(unique(1, 40), 30, lora=1)
    engine.step()
    for i in range(5):
        engine.submit(unique(10 + i, 50 - 5 * i), 2, lora=2)
    before = engine.waiting
    for _ in range(5):
        engine.step()
        assert engine.waiting == before
        assert engine.running == [first]
        assert {r.request_id for r in engine.scheduler.deferred_waiting} == set(before)
    plain = engine.submit(unique(30, 40), 2)
    engine.step()
    assert plain in engine.started
    engine.run()
    assert len(engine.finished) == 7
    assert sum(engine.counters("scheduler_admissions").values()) == 7
    empty(engine)


def test_overdue_requests_that_the_engine_skips_do_not_block(base):
    """Nothing can be done for an overdue request whose adapter has no slot."""
    engine = with_loras(Engine(sched_settings(max_wait_s=1.0), base=base), 1)
    first = engine.submit(unique(1, 40), 30, lora=1)
    engine.step(seconds=0.0)
    stuck = engine.submit(unique(2, 40), 2, lora=2)
    engine.step(seconds=5.0)
    free = engine.submit(unique(3, 40), 2)
    engine.step()
    assert engine.started == [first, free]
    engine.run()
    assert stuck in engine.finished


# -- pause -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_pause_and_resume(base, state):
    engine = Engine(sched_settings(max_wait_s=10.0), base=base)
    running = engine.submit(unique(1, 40), 40)
    engine.step(1.0)
    waiting = engine.submit(unique(2, 400))
    engine.scheduler.set_pause_state(state)
    for _ in range(5):
        output = engine.step(100.0)
        assert waiting not in output.num_scheduled_tokens
        assert (running in output.num_scheduled_tokens) == (state == PauseState.PAUSED_NEW)
    assert len(engine.queue) == 1 and engine.queue
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    quick = engine.submit(unique(3, 4))
    engine.step(1.0)
    # 500 s of pause made nothing overdue: the shorter one is still first.
    assert engine.started == [running, quick, waiting]
    engine.run()
    assert engine.counters("scheduler_admissions")["max_wait"] == 0
    waits = [v for values in engine.observations("queue_wait_s").values() for v in values]
    assert max(waits) < 10.0
    empty(engine)


def test_waiting_before_and_after_a_pause_counts(base):
    engine = Engine(sched_settings(max_wait_s=10.0), base=base, max_requests=1)
    engine.submit(unique(1, 40), 100)
    engine.step()
    old = engine.submit(unique(2, 400))
    engine.now_s = 6.0
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.now_s = 506.0
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.now_s = 606.0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step()
    assert not [e for e in engine.queue.line if e.group == 1]
    engine.now_s = 609.9
    engine.step()
    assert not [e for e in engine.queue.line if e.group == 1]
    engine.now_s = 610.1
    engine.step()
    assert [e.item.request_id for e in engine.queue.line if e.group == 1] == [old]


# -- cache resets ----------------------------------------------------------------------------------


def test_reset_prefix_cache_between_and_while_running(base):
    engine = Engine(sched_settings(), base=base, max_requests=2, max_batched_tokens=128)
    engine.serve(unique(1, 300))
    waiting = [engine.submit(unique(1, 300) + unique(5 + i, 10), 3) for i in range(4)]
    assert {e.hit_tokens for e in engine.queue.line} == {288}
    assert engine.scheduler.reset_prefix_cache()
    late = engine.submit(unique(1, 300) + unique(20, 10), 3)
    engine.step()
    assert engine.hits[engine.started[-1]] == 0
    for entry in engine.queue.line.ready():
        assert entry.hit_tokens < 288
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert set(waiting) | {late} <= engine.finished
    empty(engine)


# -- KV connectors ---------------------------------------------------------------------------------


def test_a_connector_that_is_not_ready_skips_the_request(base):
    engine = Engine(sched_settings(hit_weight=0.0, age_credit=1000.0), base=base)
    connector = connect(engine, {"r0": [(None, False)] * 3 + [(0, False)]})
    for i in range(3):
        engine.submit(unique(i, 40), 2)
    engine.step()
    assert engine.started == ["r1", "r2"]
    assert engine.waiting == ["r0"]
    engine.run()
    assert engine.started == ["r1", "r2", "r0"]
    assert connector.asked.count("r0") == 4
    empty(engine)


def test_connectors_are_asked_as_often_as_by_stock(base):
    """Scoring, waiting and growing hits never ask a connector."""

    def drive(engine: Engine) -> Connector:
        connector = connect(engine, {})
        for i in range(12):
            engine.submit(unique(i % 3, 100) + unique(20 + i, 30), 5)
        engine.run()
        return connector

    ours = drive(Engine(sched_settings(dedupe=False), base=base, max_requests=2))
    stock = drive(Engine(None, base=base, max_requests=2))
    # Asked only by the scheduler, once for each request that it was offered with slots to spare.
    assert len(ours.asked) == len(stock.asked) == 12
    engine = Engine(sched_settings(), base=base, max_requests=1)
    connector = connect(engine, {})
    engine.submit(unique(1, 40), 50)
    engine.step()
    for i in range(20):
        engine.submit(unique(2 + i % 3, 100))
    for _ in range(10):
        engine.step()
    assert connector.asked == ["r0"]


def test_an_asynchronous_load_moves_to_the_kv_holding_queue(base):
    engine = Engine(sched_settings(), base=base)
    connect(engine, {"r0": (48, True)})
    loading = engine.submit(unique(1, 60), 2)
    other = engine.submit(unique(2, 60), 2)
    engine.step()
    scheduler = engine.scheduler
    assert [r.request_id for r in scheduler.kv_holding_waiting] == [loading]
    assert len(engine.queue) == 0
    assert engine.known[loading].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.started == [other]
    for _ in range(4):
        engine.step()
    assert loading not in engine.started
    scheduler.finished_recving_kv_req_ids.add(loading)
    engine.run()
    assert engine.started == [other, loading]
    assert sum(engine.counters("scheduler_admissions").values()) == 2
    empty(engine)


def test_a_follower_does_not_wait_for_a_load(base):
    """A request whose KV is being loaded computes nothing that others could wait for."""
    engine = Engine(sched_settings(), base=base)
    connect(engine, {"r0": (480, True)})
    engine.submit(unique(1, 500), 2)
    twin = engine.submit(unique(1, 500), 2)
    engine.step()
    assert engine.started == [twin]


def test_remote_prefills_are_short_work(base):
    """Disaggregated serving: the prompt's KV comes from elsewhere, whatever the local hit."""
    engine = Engine(
        sched_settings(lanes=(Lane(200, 1),), age_credit=0.0, hit_weight=0.0),
        base=base,
        max_requests=2,
        max_batched_tokens=64,
    )
    connect(engine, {"r2": (991, True)})
    engine.submit(unique(1, 600), 2)
    engine.step()
    engine.submit(unique(2, 100), 2)
    remote = engine.submit(
        unique(3, 992), 2, extra_args={"kv_transfer_params": {"do_remote_prefill": True}}
    )
    engine.step()
    assert engine.known[remote].status == RequestStatus.WAITING_FOR_REMOTE_KVS


# -- streams of steps ------------------------------------------------------------------------------


def test_a_preempted_session_that_ends_on_a_late_output(base):
    """With steps in flight a preempted request may get its last token while it waits."""
    if base is not AsyncScheduler:
        pytest.skip("only with steps in flight")
    engine = Engine(sched_settings(), base=base, depth=2)
    name = engine.submit(unique(1, 40), 2)
    engine.step()
    engine.step()
    assert engine.running == [name]
    request = engine.scheduler.running.pop()
    engine.scheduler._preempt_request(request, 0.0)
    assert engine.waiting == [name]
    for _ in range(6):
        engine.step()
    assert request.is_finished()
    empty(engine)


def test_a_session_that_is_queued_twice_does_not_stop_the_engine(base):
    """vLLM queues a preempted session again when a late output ends its turn, then drops both."""
    if base is not AsyncScheduler:
        pytest.skip("only with steps in flight")
    engine = Engine(sched_settings(), base=base, depth=3)
    session = engine.add(engine.request(unique(1, 40), 3, resumable=True))
    other = engine.submit(unique(2, 40), 30)
    engine.step()
    engine.step()
    engine.scheduler.add_request(
        engine.request(unique(3, 30), 2, resumable=True, request_id=session)
    )
    engine.step()
    request = engine.known[session]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    for _ in range(40):
        engine.step()
        assert len(engine.queue) == len(engine.waiting) == len(set(engine.waiting))
    assert other in engine.finished


def test_chunked_prefill_switched_off_is_respected(base):
    """A lane may not cut a prompt that the engine must compute in one piece."""
    engine = Engine(
        sched_settings(lanes=(Lane(64, 2),), age_credit=1e6),
        base=base,
        chunked_prefill=False,
        max_batched_tokens=1024,
        max_model_len=1024,
    )
    engine.submit(unique(1, 900), 2)
    engine.queue.processed(100.0)
    engine.submit(unique(2, 60), 2)
    engine.run()
    assert engine.started == ["r0", "r1"]
    for name, first in engine.first_chunks.items():
        assert first == engine.known[name].num_prompt_tokens
