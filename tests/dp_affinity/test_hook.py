# SPDX-License-Identifier: Apache-2.0
"""The rule inside vLLM's own balancer: its class, its requests, no engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mimo_plugin.engines.vllm.dp_affinity import hook, report
from tests.dp_affinity.clients import answer, client, finish, question, request, send, system


def play(made, chat: int, turns: int, head: int = 300, **fields) -> list[int]:
    """Ranks of a chat's turns, each finished before the next."""
    prompt, ranks = system(head), []
    for turn in range(turns):
        prompt = [*prompt, *question(chat, turn)]
        name = f"{chat}-{turn}"
        clients_ = made if isinstance(made, list) else [made]
        one = clients_[turn % len(clients_)]
        ranks.append(send(one, request(name, prompt, **fields)))
        finish(one, name)
        prompt = [*prompt, *answer(chat, turn)]
    return ranks


def test_stock_sends_the_turns_of_one_chat_to_all_ranks():
    """What the feature is for; when this fails, vLLM has mended it."""
    assert play(client(4, affinity=False), 1, 6) == [0, 1, 2, 3, 0, 1]


def test_b26_turns_stay_and_others_spread():
    made = client(4)
    first = play(made, 1, 4)
    assert len(set(first)) == 1
    others = [play(made, chat, 1)[0] for chat in range(2, 5)]
    assert {first[0], *others} == {0, 1, 2, 3}


def test_b26_lower_load_wins():
    made = client(4)
    (home,) = set(play(made, 1, 2))
    made.lb_engines = [[0, 9 if rank == home else 0, 0.0] for rank in range(4)]
    assert play(made, 1, 1)[0] != home


def test_turns_of_one_chat_through_several_processes_stay():
    processes = [client(4, client_count=3, client_index=i) for i in range(3)]
    homes = [set(play(processes, chat, 6)) for chat in range(40)]
    assert all(len(ranks) == 1 for ranks in homes)
    assert len(set.union(*homes)) == 4


def test_b27_common_head_in_chats_and_in_plain_text():
    for text in (False, True):
        made, load, homes = client(4), [0] * 4, {}
        for turn in range(4):
            for chat in range(16):
                prompt = system(4096)
                for before in range(turn + 1):
                    prompt = [*prompt, *question(chat, before, 200), *answer(chat, before)]
                prompt = prompt[: -len(answer(chat, turn))]
                if text:
                    prompt = [token + 10 for token in prompt]
                rank = send(made, request(f"{text}-{chat}-{turn}", prompt))
                finish(made, f"{text}-{chat}-{turn}")
                load[rank] += 1
                homes.setdefault(chat, set()).add(rank)
        assert all(len(ranks) == 1 for ranks in homes.values())
        assert max(load) * 4 / sum(load) <= 1.25


def test_what_travels_is_the_stock_request():
    made, sent = client(2), request("a", [*system(10), *question(1, 0)])
    send(made, sent)
    assert sent.data_parallel_rank is None
    assert made.reqs_in_flight["a"] in made.core_engines
    assert sum(made.engine_inflight.values()) == 1


def test_a_rank_that_was_asked_for_is_kept():
    made = client(4)
    prompt = [*system(10), *question(1, 0)]
    assert [send(made, request(f"r{r}", prompt, data_parallel_rank=r)) for r in range(4)] == [
        0, 1, 2, 3,
    ]  # fmt: skip
    sent = request("x", prompt, data_parallel_rank=2)
    send(made, sent)
    assert sent.data_parallel_rank == 2


def test_streamed_input_stays_with_its_request():
    made = client(4)
    rank = send(made, request("s", [*system(10), *question(1, 0)]))
    made.lb_engines = [[0, 50 if r == rank else 0, 0.0] for r in range(4)]
    report.REPORT.drain()
    assert send(made, request("s", [*system(10), *question(2, 0)])) == rank
    assert report.REPORT.drain()["inc"] == [["dp_affinity_requests", ["other", str(rank)], 1]]


def test_what_this_process_sent_counts_before_the_coordinator_tells():
    """A burst on one session: the other ranks take over what is beyond the slack."""
    made = client(2, slack_requests=4)
    ranks = [send(made, request(f"{i}", question(i, i), session_id="agent")) for i in range(40)]
    assert ranks[:5] == [ranks[0]] * 5 and 15 <= sum(ranks) <= 25


def test_pooling_and_embeddings_are_left_to_vllm():
    from vllm import PoolingParams

    made, stock = client(4), client(4, affinity=False)
    prompt = [*system(10), *question(1, 0)]
    for fields in (
        {"sampling_params": None, "pooling_params": PoolingParams()},
        {"prompt_embeds": object()},
    ):
        ranks = [
            [send(c, request(f"{i}{sorted(fields)}", prompt, **fields)) for i in range(4)]
            for c in (made, stock)
        ]
        assert ranks[0] == ranks[1] and len(set(ranks[0])) == 4
    named = [
        send(made, request(f"n{i}", None, prompt_embeds=object(), session_id="a")) for i in range(4)
    ]
    assert len(set(named)) == 1


def test_a_named_session_is_one_chat_whatever_is_asked():
    made, ranks = client(4), set()
    for i in range(6):
        ranks.add(send(made, request(f"{i}", question(i, i), session_id="agent")))
        finish(made, f"{i}")
    assert len(ranks) == 1


def test_adapters_salts_and_images_are_chats_of_their_own():
    prompt = [*system(10), *question(1, 0)]

    def image(name):
        return [SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=14))]

    def lora(name):
        return SimpleNamespace(lora_name=name, lora_path=f"/{name}")

    for field, values in (
        ("lora_request", [lora("a"), lora("b"), lora("c"), lora("d")]),
        ("cache_salt", ["a", "b", "c", "d"]),
        ("mm_features", [image("a"), image("b"), image("c"), image("d")]),
    ):
        made = client(4)
        ranks = set()
        for i, value in enumerate(values):
            for turn in range(2):
                found = send(made, request(f"{field}{i}{turn}", prompt, **{field: value}))
                finish(made, f"{field}{i}{turn}")
            ranks.add(found)
        assert ranks == {0, 1, 2, 3}, field


def test_ranks_of_one_node_are_reported_by_their_own_number():
    """Hybrid balancing: the client has ranks 4 and 5 of more."""
    report.REPORT.drain()
    made = client(2, first_rank=4)
    for chat in range(2):
        play(made, chat, 2)
    send(made, request("given", [1], data_parallel_rank=1))
    told = {tuple(labels): value for _, labels, value in report.REPORT.drain()["inc"]}
    assert told == {
        ("new", "4"): 1, ("new", "5"): 1, ("stayed", "4"): 1, ("stayed", "5"): 1, ("other", "5"): 1,
    }  # fmt: skip
    assert report.REPORT.drain() is None


def test_ranks_come_and_go():
    """Elastic scaling: counts and engines change one after the other."""
    made = client(4)
    homes = [play(made, chat, 2)[0] for chat in range(8)]
    made.core_engines = made.core_engines[:2]
    made.lb_engines = made.lb_engines[:2]
    assert all(rank < 2 for chat in range(8) for rank in play(made, chat, 2))
    assert max(homes) == 3
    made.core_engines = [rank.to_bytes(2, "little") for rank in range(4)]
    assert all(rank < 2 for chat in range(8) for rank in play(made, chat, 1))


def test_an_engine_without_the_feature_keeps_the_stock_balancer(monkeypatch):
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    made = client(4, affinity=False)
    assert play(made, 1, 4) == play(client(4, affinity=False), 2, 4) == [0, 1, 2, 3]
    first = DPLBAsyncMPClient.get_core_engine_for_request
    hook.install()
    assert DPLBAsyncMPClient.get_core_engine_for_request is first


@pytest.mark.parametrize("wanted", [True, False])
def test_the_client_of_an_engine_with_the_feature_gets_a_balancer(monkeypatch, wanted):
    """Through the client's own constructor, with everything below it taken away."""
    from vllm.v1.engine.core_client import DPAsyncMPClient, DPLBAsyncMPClient

    hook.install()

    def stock(self, vllm_config, executor, log_stats, addresses, count, index, renderer):
        self.core_engines, self.client_index = [b"\0\0", b"\1\0"], index

    monkeypatch.setattr(DPAsyncMPClient, "__init__", stock)
    features = ["kv", "dp_affinity"] if wanted else ["kv"]
    section = {"features": features}
    if wanted:
        section["dp_affinity"] = {"answer_token_ids": [7, 8], "slack_requests": 3}
    vllm_config = SimpleNamespace(additional_config={"mimo": section})
    for count in (1, 2):
        made = DPLBAsyncMPClient(vllm_config, None, True, None, count, 0)
        made._finalizer = lambda: None
        balancer = getattr(made, hook._BALANCER, None)
        assert (balancer is not None) == wanted
        if balancer is not None:
            assert balancer._keys.opening == (7, 8)
            assert balancer._rule._alone == (count == 1)
            assert balancer._rule._slack_requests == 3
