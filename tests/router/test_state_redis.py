# SPDX-License-Identifier: Apache-2.0
"""Router processes that share a real Redis server: they know the same, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

pytest.importorskip("redis", reason="no Redis client here; pip install 'mimo-plugin[tiers]'")
pytest.importorskip("msgspec")

from mimo_plugin.core.cost import PrefillCost
from mimo_plugin.core.load import Speed
from mimo_plugin.core.reservations import Reservations
from mimo_plugin.core.routing import Router
from mimo_plugin.core.targets import Request, Target
from mimo_plugin.errors import ConfigError
from mimo_plugin.router.state import (
    Done,
    FirstToken,
    MemoryState,
    RouterListener,
    Sent,
    WorkerChanged,
    open_state,
)
from mimo_plugin.router.state_limits import StateLimits
from mimo_plugin.router.state_redis import RedisState
from mimo_plugin.router.state_url import StateUnavailable, StateUrl
from tests.router.redis_server import RedisServer, free_port

UNIT = 16
SPEED = Speed(PrefillCost(1e9), tokens_per_s=1000.0, fixed_s=0.0)  # 1 ms a token
QUICK = StateLimits(timeout_s=1.0, heartbeat_s=0.1, lease_s=1.0, flush_s=0.001, retry_s=0.2)
BOUND_S = 10.0  # for what takes a second or two on an idle machine


def prompt(name, blocks):
    return [hash((name, index)) for index in range(blocks)]


class Node:
    """What one router process has."""

    def __init__(self, state, names="abcd", seed=0):
        self.state = state
        self.reservations = Reservations(UNIT, UNIT, every_block=True)
        self.router = Router(lambda *_: {}, self.reservations, SPEED, random.Random(seed))
        for name in names:
            self.router.set_target(Target(name))
        self.workers = []
        self.listener = RouterListener(self.router, self.workers.append, time.monotonic)
        self.flying = {}
        self.turns = {}

    def send(self, request, **how):
        now_s = time.monotonic()
        decision = self.router.choose(request, now_s, **how)
        self.router.sent(request, decision, now_s)
        self.state.publish(Sent.of(request, decision))
        self.flying[request.id] = request
        return decision

    def first_token(self, request, decode_on=None):
        self.router.first_token(request, time.monotonic(), decode_on)
        self.state.publish(FirstToken(request.id, request.prompt_tokens, decode_on))

    def done(self, request, failed=False):
        self.router.done(request, time.monotonic(), failed=failed)
        self.state.publish(Done(request.id, failed))
        self.flying.pop(request.id, None)

    def loads(self):
        """Comparable between processes: each names only others' requests with their process."""
        found = {}
        for name, load in self.router.loads.items():
            if load.prefills or load.decodes:
                found[name] = (
                    sorted((self.whole(r), round(s, 6)) for r, s in load.prefills.items()),
                    sorted((self.whole(r), n) for r, n in load.decodes.items()),
                )
        return found

    def homes(self):
        return {session: home for session, home, _ in self.router.sessions()}

    def whole(self, request):
        return request if "/" in request else f"{self.state.process}/{request}"


@asynccontextmanager
async def nodes(url, count, limits=QUICK, given=None, names="abcd"):
    """So many processes' worth of state and router, in this one."""
    made = []
    try:
        for seed in range(count):
            made.append(Node(RedisState(url, clock=time.monotonic, limits=limits), names, seed))
            await made[-1].state.start(made[-1].listener, given or {})
        yield made
    finally:
        for node in made:
            await node.state.close()


async def until(condition, made=()):
    start_s = time.monotonic()
    while not condition():
        late = time.monotonic() > start_s + BOUND_S
        assert not late, f"it did not come true in time; {differences(made) if made else ''}"
        await asyncio.sleep(0.005)
    return time.monotonic() - start_s


def agree(made):
    return not differences(made)


def differences(made):
    """What others have that the first one has not, or has otherwise."""
    mine, homes, found = made[0].loads(), set(made[0].homes().items()), []
    for node in made[1:]:
        theirs = node.loads()
        for name in mine.keys() | theirs.keys():
            for one, other in zip(
                mine.get(name, ([], [])), theirs.get(name, ([], [])), strict=True
            ):
                found += [(name, *entry) for entry in set(one) ^ set(other)]
        found += homes ^ set(node.homes().items())
    return found


@pytest.fixture
def server():
    made = RedisServer().start()
    yield made
    made.kill()


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 120))


def play(made, rnd, steps, number):
    """A random history at random nodes."""
    for _ in range(steps):
        node = rnd.choice(made)
        act = rnd.choice(["send", "send", "first", "done", "done", "retry"])
        if act == "send":
            number += 1
            session = rnd.choice([None, "s1", "s2", f"s{number}"])
            if time.monotonic() < made[0].turns.get(session, 0.0) + 0.05:
                session = None  # turns of a chat do not come at the same time
            made[0].turns[session] = time.monotonic()
            hashes = prompt(rnd.choice("xyz"), rnd.randint(1, 30))
            asked = Request(str(number), hashes, rnd.randint(1, 500), session=session)
            node.send(asked)
        elif node.flying:
            asked = node.flying[rnd.choice(sorted(node.flying))]
            if act == "first":
                node.first_token(asked, rnd.choice([None, "a"]))
            elif act == "retry" and len(set(node.router._where[asked.id])) < 4:
                node.send(replace(asked, session=None), exclude=node.router._where[asked.id])
            elif act == "done":
                node.done(asked, rnd.random() < 0.2)
    return number


@pytest.mark.parametrize("seed", range(5))
def test_after_any_history_all_know_the_same(server, seed):
    async def scenario():
        rnd, number = random.Random(seed), 0
        async with nodes(server.url, 3) as made:
            for _ in range(20):
                number = play(made, rnd, rnd.randint(1, 60), number)
                await asyncio.sleep(rnd.choice([0, 0, 0.002, 0.02, 0.06]))
            await until(lambda: agree(made), made)
            assert made[0].loads() and made[0].homes()
            for node in made:
                for asked in list(node.flying.values()):
                    node.done(asked)
            await until(lambda: not any(node.loads() for node in made))
            assert not any(node.router._elsewhere or node.router._where for node in made)
            assert all(node.state.status["dropped"] == 0 for node in made)
            assert all(node.state.status["decode_errors"] == 0 for node in made)

    run(scenario())


def test_who_starts_later_learns_what_is_in_flight_and_where_sessions_are(server):
    async def scenario():
        async with nodes(server.url, 2) as made:
            play(made, random.Random(7), 300, 0)
            await until(lambda: agree(made), made)
            async with nodes(server.url, 1) as later:
                await until(lambda: agree([*made, *later]), [*made, *later])
                assert later[0].loads() and later[0].homes()
                # A prompt that another process sent is on its way.
                asked = Request("new", prompt("fresh", 50), 50 * UNIT + 1)
                target = made[0].send(asked).target
                again = Request("again", prompt("fresh", 50), 50 * UNIT + 1)

                def reserved():
                    found = later[0].router.choose(again, time.monotonic()).candidates
                    return {c.target for c in found if c.hit_tokens == 50 * UNIT} == {target}

                await until(reserved)

    run(scenario())


def test_two_that_share_spread_a_burst_and_two_that_do_not_collide(server):
    """Eight equally long prompts, four at each of two routers, for eight workers."""

    async def burst(seed, share):
        async with nodes(server.url, 2, names="abcdefgh") as made:
            if not share:
                for node in made:
                    await node.state.close()
                    node.state = MemoryState()
            seen = Counter()
            for number in range(8):
                node = made[number % 2]
                node.router._random.seed(seed + number)
                asked = Request(f"{number}", prompt(number, 10), 10 * UNIT + 1)
                seen[node.send(asked).target] += 1
                if share:
                    await until(lambda: agree(made), made)
            return max(seen.values())

    async def scenario():
        assert [await burst(seed, True) for seed in range(5)] == [1] * 5
        assert max([await burst(seed, False) for seed in range(5)]) > 1

    run(scenario())


def test_equal_prompts_are_computed_once_by_two_that_share(server):
    async def burst(share):
        async with nodes(server.url, 2) as made:
            hits = 0
            for number in range(6):
                node = made[number % 2]
                found = node.send(Request(f"{number}", prompt("same", 100), 1601), exclude="cd")
                hits += found.chosen.hit_tokens
                if share:
                    await until(lambda: agree(made), made)
            return hits

    async def scenario():
        assert await burst(True) > 0

    run(scenario())


CHILD = """
import asyncio, sys, time
from tests.router.test_state_redis import Node, QUICK, Request, prompt
from mimo_plugin.router.state_redis import RedisState

async def main():
    node = Node(RedisState(sys.argv[1], clock=time.monotonic, limits=QUICK))
    await node.state.start(node.listener, {})
    for number in range(int(sys.argv[2])):
        node.send(Request(str(number), prompt(number, 20), 321, session=f"c{number}"))
        if number % 2:
            node.first_token(node.flying[str(number)])
        await asyncio.sleep(0)
    print(node.state.process, flush=True)
    if sys.argv[3] == "close":
        await asyncio.sleep(0.5)
        await node.state.close()
        return
    while True:
        print(sum(l.in_flight + len(l.decodes) for l in node.router.loads.values()), flush=True)
        await asyncio.sleep(0.05)

asyncio.run(main())
"""


async def child(url, requests, end="stay"):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, url, str(requests), end, stdout=asyncio.subprocess.PIPE
    )
    name = (await process.stdout.readline()).decode().strip()
    assert name
    return process, name


def in_flight(node):
    return sum(load.in_flight + len(load.decodes) for load in node.router.loads.values())


def test_the_load_of_a_killed_process_goes_away(server):
    async def scenario():
        async with nodes(server.url, 2) as made:
            process, _ = await child(server.url, 40)
            try:
                await until(lambda: all(in_flight(node) == 40 for node in made))
                asked = Request("mine", prompt("mine", 3), 49)
                made[0].send(asked)
                while int(await process.stdout.readline()) != 41:  # and it knows of ours
                    pass
                await asyncio.sleep(2 * QUICK.lease_s)
                assert in_flight(made[1]) == 41  # it lives, though it says nothing new
                process.send_signal(signal.SIGKILL)
                await process.wait()
                took_s = await until(lambda: all(in_flight(node) == 1 for node in made))
                assert took_s < QUICK.lease_s + 2
                assert all(f"c{n}" in made[1].homes() for n in range(40))  # the workers live
                assert all(node.state.status["peers"] == 1 for node in made)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    run(scenario())


def test_a_process_that_ends_says_so(server):
    async def scenario():
        patient = replace(QUICK, lease_s=600.0)
        async with nodes(server.url, 1, patient) as made:
            process, _ = await child(server.url, 10, "close")
            await until(lambda: in_flight(made[0]) == 10)
            await process.wait()
            await until(lambda: in_flight(made[0]) == 0)
            assert made[0].state.status["peers"] == 0

    run(scenario())


def test_a_process_that_slept_is_back_with_its_load(server):
    async def scenario():
        async with nodes(server.url, 1) as made:
            process, _ = await child(server.url, 12)
            try:
                await until(lambda: in_flight(made[0]) == 12)
                process.send_signal(signal.SIGSTOP)
                await until(lambda: in_flight(made[0]) == 0)
                process.send_signal(signal.SIGCONT)
                await until(lambda: in_flight(made[0]) == 12)
            finally:
                process.kill()
                await process.wait()

    run(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_is_killed_costs_nothing_but_the_sharing(server, seed, caplog):
    """It is killed in the middle of a history, and is empty when it is back."""

    async def scenario():
        rnd = random.Random(seed)
        async with nodes(server.url, 3) as made:
            number = play(made, rnd, 200, 0)
            made[0].state.publish(WorkerChanged("http://new", {"role": "both"}, added=True))
            await until(lambda: agree(made) and all(n.workers for n in made[1:]))
            server.kill()
            start_s = time.monotonic()
            for _ in range(10):
                number = play(made, rnd, 100, number)
                await asyncio.sleep(0)
            assert time.monotonic() - start_s < 1.0  # nobody waits
            await until(lambda: not any(n.state.status["connected"] for n in made))
            number = play(made, rnd, 100, number)
            made[1].state.publish(WorkerChanged("http://newer", added=True))
            # After the lease each counts its own only.
            await until(lambda: all("/" not in r for n in made for r in n.router._where))
            assert all(n.state.status["queue"] == 0 and n.state.status["last_error"] for n in made)
            server.start()
            took_s = await until(lambda: all(n.state.status["connected"] for n in made))
            number = play(made, rnd, 100, number)
            took_s += await until(lambda: agree(made), made)
            assert took_s < 5.0
            await until(lambda: {w.url for w in made[2].workers} == {"http://new", "http://newer"})
            async with nodes(server.url, 1) as later:
                await until(lambda: agree([*made, *later]), [*made, *later])
                assert {w.url for w in later[0].workers} == {"http://new", "http://newer"}
            assert all(n.state.status["reconnects"] == 1 for n in made)

    with caplog.at_level(logging.INFO, "mimo_plugin.router"):
        run(scenario())
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 3 and all("routes by what it knows" in line for line in lines)


def test_a_server_that_hangs_delays_nobody(server):
    async def scenario():
        async with nodes(server.url, 2) as made:
            server.send(signal.SIGSTOP)
            try:
                took_s = []
                for number in range(300):
                    start_s = time.monotonic()
                    made[0].send(Request(str(number), prompt(number, 5), 81))
                    took_s.append(time.monotonic() - start_s)
                    await asyncio.sleep(0.01)
                # A busy machine may hold up one or two; who waits for the server is held up often.
                assert sorted(took_s)[-4] < 0.5
                assert not made[0].state.status["connected"]
            finally:
                server.send(signal.SIGCONT)
            await until(lambda: agree(made) and in_flight(made[1]) == 300)

    run(scenario())


def test_an_emptied_server_is_filled_again(server):
    async def scenario():
        import redis.asyncio

        async with nodes(server.url, 2) as made:
            play(made, random.Random(3), 200, 0)
            await until(lambda: agree(made), made)
            client = redis.asyncio.Redis.from_url(server.url)
            await client.flushall()
            await client.aclose()
            play(made, random.Random(4), 50, 1000)
            await asyncio.sleep(5 * QUICK.heartbeat_s)
            async with nodes(server.url, 1) as later:
                await until(lambda: agree([*made, *later]), [*made, *later])
                assert later[0].loads() and later[0].homes()

    run(scenario())


def test_more_than_the_queue_holds_is_learned_all_the_same(server):
    async def scenario():
        async with nodes(server.url, 2, replace(QUICK, queue_changes=50)) as made:
            for number in range(2000):  # without giving the writer a turn
                asked = Request(str(number), prompt(number % 7, 9), 145)
                made[0].send(asked)
                if number % 10:
                    made[0].done(asked)
            assert made[0].state.status["queue"] <= 50
            await until(lambda: agree(made) and in_flight(made[1]) == 200)
            assert made[0].state.status["dropped"] > 1000
            assert made[1].state.status["reloads"] >= 1

    run(scenario())


def test_a_stream_that_is_cut_is_made_good(server):
    """A reader that is slower than the stream is long."""

    async def scenario():
        import redis.asyncio

        async with nodes(server.url, 2) as made:
            client = redis.asyncio.Redis.from_url(server.url)
            await until(lambda: made[1].state.status["peers"] == 1)
            async with made[1].state._loading:  # it can't read on
                for number in range(100):
                    asked = Request(str(number), prompt(number, 9), 145)
                    made[0].send(asked)
                    if number % 3:
                        made[0].done(asked)
                    await asyncio.sleep(0.002)
                await until(lambda: made[0].state.status["queue"] == 0)
                await asyncio.sleep(0.05)
                await client.xtrim("mimo-router:1:default:stream", maxlen=0, approximate=False)
            await client.aclose()
            await until(lambda: agree(made) and in_flight(made[1]) == 34)

    run(scenario())


def test_old_batches_and_dead_processes_leave_the_server(server):
    async def scenario():
        import redis.asyncio

        client = redis.asyncio.Redis.from_url(server.url)
        limits = replace(QUICK, stream_s=0.5, lease_s=0.3, session_ttl_s=1.0)
        async with nodes(server.url, 2, limits) as made:
            for number in range(500):
                asked = Request(str(number), prompt(number, 900), 14401, session=f"s{number}")
                made[0].send(asked)
                made[0].done(asked)
                await asyncio.sleep(0.001)
            process, name = await child(server.url, 3)
            process.kill()
            await process.wait()
            await asyncio.sleep(5)
            assert await client.xlen("mimo-router:1:default:stream") < 110  # a node is kept whole
            assert await client.zcard("mimo-router:1:default:sessions") == 0
            assert await client.zcard("mimo-router:1:default:processes") == 2
            assert not await client.exists(f"mimo-router:1:default:open:{name}")
        assert await client.zcard("mimo-router:1:default:processes") == 0
        await client.aclose()

    run(scenario())


def test_namespaces_are_apart(server):
    async def scenario():
        one, two = nodes(server.url + "?namespace=one", 1), nodes(server.url + "?namespace=two", 1)
        async with one as ones, two as twos:
            ones[0].send(Request("1", prompt("x", 3), 49))
            await asyncio.sleep(0.3)
            assert twos[0].state.status["peers"] == 0 and not twos[0].loads()

    run(scenario())


# Workers


def test_workers_of_run_time_are_shared_and_kept(server):
    async def scenario():
        url, given = "http://w", {"http://given": {"role": "prefill"}}
        async with nodes(server.url, 2, given=given) as made:
            made[0].state.publish(WorkerChanged(url, {"role": "decode"}, added=True))
            await until(lambda: made[1].workers)
            assert (made[1].workers[0].url, made[1].workers[0].settings) == (
                url,
                {"role": "decode"},
            )
            made[1].state.publish(WorkerChanged(url, drained=True))
            await until(lambda: made[0].workers)
            assert made[0].workers[0].drained and made[0].workers[0].settings == {"role": "decode"}
            made[0].state.publish(WorkerChanged("http://given", drained=True))
            await until(lambda: len(made[1].workers) == 2)
        async with nodes(server.url, 1, given=given) as again:
            found = {w.url: w for w in again[0].workers}
            assert set(found) == {url, "http://given"}
            assert found[url].drained and found[url].settings == {"role": "decode"}
            assert found["http://given"].drained
            again[0].state.publish(WorkerChanged(url, removed=True))
            await asyncio.sleep(0.2)
        async with nodes(server.url, 1) as later:
            assert [w.url for w in later[0].workers if not w.removed] == []

    run(scenario())


def test_a_removed_worker_of_the_command_line_is_back_after_a_restart(server):
    async def scenario():
        given = {"http://given": {"role": "prefill"}}
        async with nodes(server.url, 2, given=given) as made:
            made[0].state.publish(WorkerChanged("http://given", removed=True))
            await until(lambda: made[1].workers)
            assert made[1].workers[0].removed
            async with nodes(server.url, 1, given=given) as again:
                assert again[0].workers == []
                await until(lambda: len(made[1].workers) == 2)
                assert not made[1].workers[1].removed
                assert made[1].workers[1].settings == {"role": "prefill"}
        # It was of a command line: who has another one does not get it.
        async with nodes(server.url, 1) as other:
            assert other[0].workers == []

    run(scenario())


def test_the_later_of_two_changes_counts_everywhere(server):
    async def scenario():
        async with nodes(server.url, 3) as made:
            for number in range(30):
                node = made[number % 3]
                node.state.publish(WorkerChanged("http://w", added=True, drained=bool(number % 2)))
                await asyncio.sleep(random.Random(number).choice([0, 0.001]))
            await asyncio.sleep(0.5)
            last = [node.state._workers._all["http://w"] for node in made]
            assert last[0] == last[1] == last[2]

    run(scenario())


# Snapshots


def test_snapshots_survive_their_router(server):
    async def scenario():
        data = random.Random(0).randbytes(3_500_000)
        async with nodes(server.url, 2) as made:
            assert await made[0].state.load_snapshot("http://w#1") is None
            assert await made[0].state.save_snapshot("http://w#1", data)
            assert not await made[1].state.save_snapshot("http://w#1", b"later")  # the other's
            assert await made[1].state.save_snapshot("empty", b"")
            assert await made[0].state.save_snapshot("http://w#1", data[::-1])
        async with nodes(server.url, 1) as later:
            assert await later[0].state.load_snapshot("http://w#1") == data[::-1]
            assert await later[0].state.load_snapshot("empty") == b""

    run(scenario())


def test_a_snapshot_that_is_too_large_old_or_damaged_is_none(server):
    async def scenario():
        import redis.asyncio

        client = redis.asyncio.Redis.from_url(server.url)
        limits = replace(QUICK, snapshot_bytes=2_000_000, snapshot_ttl_s=0.4, snapshot_lease_s=0.2)
        noise = random.Random(0).randbytes(2_100_000)
        async with nodes(server.url, 2, limits) as made:
            assert not await made[0].state.save_snapshot("large", noise)
            assert await made[0].state.save_snapshot("zeros", bytes(50_000_000))  # compressed
            assert await made[1].state.load_snapshot("zeros") == bytes(50_000_000)
            await asyncio.sleep(0.5)
            assert await made[1].state.load_snapshot("zeros") is None
            assert await made[1].state.save_snapshot("zeros", b"its turn")
            assert await made[0].state.load_snapshot("zeros") == b"its turn"
            assert await made[0].state.save_snapshot("damaged", noise[:1_500_000])
            key = "mimo-router:1:default:snapshot:damaged"
            await client.hset(key, "1", b"x" + (await client.hget(key, "1"))[1:])
            assert await made[1].state.load_snapshot("damaged") is None
            await client.hdel(key, "1")
            assert await made[1].state.load_snapshot("damaged") is None
            server.kill()
            assert not await made[0].state.save_snapshot("zeros", b"x")
            assert await made[0].state.load_snapshot("zeros") is None
            assert "snapshot" in made[0].state.status["last_error"]
        await client.aclose()

    run(scenario())


# Start


def test_a_start_without_a_server_stops_with_one_line():
    async def scenario():
        url = f"redis://:secret@127.0.0.1:{free_port()}/0"
        node = Node(RedisState(url, clock=time.monotonic, limits=QUICK))
        with pytest.raises(StateUnavailable, match="fix: start it") as raised:
            await node.state.start(node.listener, {})
        assert "secret" not in str(raised.value) and "\n" not in str(raised.value)

    run(scenario())


def test_a_wrong_password_stops_the_start_and_a_right_one_does_not():
    server = RedisServer("--requirepass", "right").start()

    async def scenario():
        for user in ("", ":wrong@"):
            url = f"redis://{user}127.0.0.1:{server.port}/0"
            node = Node(RedisState(url, clock=time.monotonic, limits=QUICK))
            with pytest.raises(StateUnavailable, match="password|uthentication") as raised:
                await node.state.start(node.listener, {})
            assert "wrong" not in str(raised.value).replace("wrong password", "")
        async with nodes(f"redis://:right@127.0.0.1:{server.port}/3", 2) as made:
            made[0].send(Request("1", prompt("x", 3), 49))
            await until(lambda: in_flight(made[1]) == 1)

    try:
        run(scenario())
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "--state: found 'http://h'"),
        ("redis://", "--state: found 'redis://"),
        ("redis://h:port/0", "--state: found 'redis://h:port/0'"),
        ("redis://u:secret@h:99999/0", "--state: found 'h:99999/0'"),
        ("redis://h/zero", "--state: found 'redis://h:6379/zero'"),
        ("redis://h/0?namespace=a b", "--state namespace: found 'a b'"),
        ("redis://h/0?namespace=", "--state namespace: found ''"),
        ("redis://:secret@h/0?no_such=1", "--state: found 'redis://h:6379/0'"),
        ("nothing", "--state: found 'nothing'"),
    ],
)
def test_a_url_that_is_none_is_one_line(url, says):
    async def scenario():
        with pytest.raises(ConfigError) as raised:
            open_state(url, time.monotonic)
            await open_state(url, time.monotonic).start(None, {})
        assert str(raised.value).startswith(says) and "secret" not in str(raised.value)
        assert "\n" not in str(raised.value)

    run(scenario())


def test_urls():
    found = StateUrl.parse("rediss://me:pw@host:1/2?namespace=n.1&ssl_check_hostname=false")
    assert found.url == "rediss://me:pw@host:1/2?ssl_check_hostname=false"
    assert (found.shown, found.namespace) == ("rediss://host:1/2", "n.1")
    assert StateUrl.parse("redis://host").namespace == "default"
    assert isinstance(open_state("memory", time.monotonic), MemoryState)
