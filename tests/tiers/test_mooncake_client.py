# SPDX-License-Identifier: Apache-2.0
"""The library's process with libraries that misbehave, and the URLs that say where a store is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.config_tiers import TiersConfig
from mimo_plugin.errors import ConfigError
from mimo_plugin.tiers import mooncake_client
from mimo_plugin.tiers.breaker import Breaker
from mimo_plugin.tiers.mooncake_client import MooncakeUnavailable, require_library
from mimo_plugin.tiers.mooncake_store import MooncakeStore, open_mooncake, require_mooncake
from mimo_plugin.tiers.mooncake_url import MooncakeSettings, parse_mooncake
from mimo_plugin.tiers.open import open_store, require_store
from tests.tiers.mooncake_cluster import free_ports
from tests.tiers.stores import empty, page

PATIENT_S = 60.0

LIBRARY = """
import ctypes, os, sys, time

class MooncakeDistributedStore:
    def __init__(self):
        self.held = {}

    def setup(self, *arguments):
        self.arguments = arguments
        return 0

    def register_buffer(self, start, size):
        return 0

    def batch_is_exist(self, keys):
        return [int(key in self.held) for key in keys]

    def batch_put_from(self, keys, places, sizes):
        for key, place, size in zip(keys, places, sizes):
            self.held[key] = ctypes.string_at(place, size)
        return [0] * len(keys)

    def batch_get_into(self, keys, places, sizes):
        codes = []
        for key, place, size in zip(keys, places, sizes):
            value = self.held.get(key)
            if value is None:
                codes.append(-704)
            elif len(value) > size:
                codes.append(-600)
            else:
                ctypes.memmove(place, value, len(value))
                codes.append(len(value))
        return codes

    def get_size(self, key):
        return len(self.held[key]) if key in self.held else -704

    def remove(self, key, force=False):
        return 0 if self.held.pop(key, None) is not None else -704
"""


@pytest.fixture
def master():
    """Accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Puts a library in place of Mooncake's, in processes started from now on."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("GLOG_minloglevel", raising=False)

    def write(change="", text=LIBRARY):
        (package / "store.py").write_text(text + change)

    write()
    return write


@pytest.fixture
def make(master):
    made = []

    def start(timeout_s=PATIENT_S, **options):
        settings = replace(parse_mooncake("url", master), buffer_mib=8, **options)
        made.append(MooncakeStore(settings, timeout_s=timeout_s))
        return made[-1]

    yield start
    for store in made:
        store.close()


@pytest.fixture
def spawned(monkeypatch):
    """The library's processes, as they are started."""
    found = []
    spawn = mooncake_client._spawn
    monkeypatch.setattr(mooncake_client, "_spawn", lambda *a: found.append(spawn(*a)) or found[-1])
    return found


def method(name, *lines):
    """Code that replaces a method of the library."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"\ndef {name}(self, *arguments):\n{body}\nMooncakeDistributedStore.{name} = {name}\n"


def test_a_library_that_works(library, make):
    store = make()
    assert store.put(["a", "b"], [page(1), page(2)]) == [True, True]
    found = [empty(), empty()]
    assert store.get(["b", "c"], found) == [True, False] and found[0] == page(2)


def test_what_it_is_set_up_with(library, make, tmp_path):
    seen = tmp_path / "seen"
    library(method("setup", f"open({str(seen)!r}, 'w').write(repr(arguments))", "return 0"))
    store = make(protocol="rdma", device="mlx5_0,mlx5_1", segment_gib=0.5, metadata="http://m/x")
    store.start()
    master = store._client.settings.master
    assert eval(seen.read_text()) == (
        *("127.0.0.1", "http://m/x", 1 << 29, 0, "rdma", "mlx5_0,mlx5_1", master),
    )
    store = make(local="here")
    store.start()
    assert eval(seen.read_text())[:3] == ("here", "P2PHANDSHAKE", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "\nraise ImportError('libibverbs.so.1: no such file')",
            "no client library (libibverbs.so.1: no such file); fix: pip install 'mimo-pl",
        ),
        (
            method("setup", "print('no such device mlx5_9', file=sys.stderr)", "return -1"),
            "the client did not start: setup ended with -1 (no such device mlx5_9)",
        ),
        (method("register_buffer", "return -600"), "register_buffer of 8388608 bytes ended with"),
        (
            method("setup", "print('check failed', flush=True)", "os._exit(3)"),
            "the client ended with status 3 (check failed)",
        ),
        (
            method("setup", "raise ValueError('x')"),
            "the client ended with status 1 (ValueError: x)",
        ),
    ],
)
def test_a_library_that_does_not_start(library, make, change, words):
    library(change)
    store = make()
    with pytest.raises(MooncakeUnavailable) as caught:
        store.start()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_one_that_can_be_loaded_or_not(library, tmp_path, master):
    require_library()
    library("\nraise OSError('no such file')")
    with pytest.raises(MooncakeUnavailable, match="no such file"):
        require_library()
    with pytest.raises(MooncakeUnavailable, match=r"^here: no client library"):
        require_mooncake("here", [master])


@pytest.mark.parametrize(
    ("what", "change", "words"),
    [
        ("exists", method("batch_is_exist", "return [-900]"), "batch_is_exist ended with -900"),
        ("get", method("batch_get_into", "return [-800]"), "get ended with -800"),
        ("get", method("batch_get_into", "return [-600]"), "get ended with -600"),
        ("get", method("batch_get_into", "raise OSError('x')"), r"OSError\('x'\)"),
        ("put", method("batch_put_from", "return [-800]"), "put ended with -800"),
        ("put", method("batch_put_from", "os._exit(11)"), "its process ended"),
    ],
)
def test_one_that_fails(library, make, what, change, words):
    """Its process ends, so that nothing of the call is left."""
    library(change)
    store = make()
    store.start()
    session = store._client.connect(time.monotonic() + PATIENT_S)
    memory = page(9)
    arguments = (["a"],) if what == "exists" else (["a"], [memory])
    with pytest.raises(MooncakeUnavailable, match=words):
        getattr(store, what)(*arguments)
    assert session.over and session._process.poll() is not None
    assert memory == page(9)
    library()
    assert store.put(["a"], [page(1)]) == store.get(["a"], [memory]) == [True]
    assert memory == page(1)


@pytest.mark.parametrize("code", [-200, -703, -714, -1700])
def test_pages_that_are_not_taken(library, make, code):
    library(method("batch_put_from", f"return [0, {code}, -705]"))
    store = make()
    assert store.put(["a", "b", "c"], [page(1)] * 3) == [True, False, True]
    assert (store.stats().pages_put, store.stats().pages_dropped) == (2, 1)
    assert not store._client.connect(0.0).over


@pytest.mark.parametrize("code", [-703, -704, -707])
def test_pages_that_are_not_to_be_had(library, make, code):
    library(method("batch_get_into", f"return [{code}]"))
    store = make()
    assert store.get(["a"], [empty()]) == [False]
    assert (store.stats().pages_missed, store.stats().pages_damaged) == (1, 0)
    assert not store._client.connect(0.0).over


def test_one_that_answers_late(library, make, tmp_path):
    """The call ends in time, and so does the library: it can't write any more."""
    library(
        method(
            "batch_get_into",
            "time.sleep(1)",
            f"open({str(tmp_path / 'late')!r}, 'w')",
            "return [0]",
        )
    )
    store = make()
    store.start()
    store._timeout_s = 0.2
    started_s = time.monotonic()
    with pytest.raises(MooncakeUnavailable, match="no answer in time"):
        store.get(["a"], [empty()])
    assert time.monotonic() - started_s < 1.0
    time.sleep(1.2)
    assert not (tmp_path / "late").exists()


def test_one_that_starts_late(library, make, spawned):
    """Calls are not held up by it, and use it once it has started; it is not started twice."""
    library(method("setup", "time.sleep(1)", "return 0"))
    store = make(timeout_s=0.2)
    for _ in range(2):
        with pytest.raises(MooncakeUnavailable, match="the client is still starting"):
            store.exists(["a"])
    store._timeout_s = PATIENT_S
    assert store.exists(["a"]) == [False]
    assert len(spawned) == 1


def test_one_that_never_starts(library, make, monkeypatch):
    library(method("setup", "time.sleep(600)"))
    monkeypatch.setattr(mooncake_client, "START_S", 0.5)
    store = make()
    with pytest.raises(MooncakeUnavailable, match=r"has not started in 0\.5 s"):
        store.start()


def test_closed_while_it_starts(library, make):
    library(method("setup", "time.sleep(0.5)", "return 0"))
    store = make(timeout_s=0.1)
    with pytest.raises(MooncakeUnavailable):
        store.exists(["a"])
    store.close()
    end_s = time.monotonic() + PATIENT_S
    while store._client._starting:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert store._client._session is None
    with pytest.raises(MooncakeUnavailable, match="closed"):
        store.exists(["a"])


def test_lanes_are_all_taken(library, make):
    library(method("batch_is_exist", "time.sleep(1)", "return [0]"))
    store = make()
    store.start()
    busy = [threading.Thread(target=store.exists, args=(["a"],)) for _ in range(4)]
    for thread in busy:
        thread.start()
    while not store._client._session.lanes.empty():
        time.sleep(0.01)
    store._timeout_s = 0.1
    with pytest.raises(MooncakeUnavailable, match="calls before this one"):
        store.exists(["a"])
    for thread in busy:
        thread.join()
    assert not store._client.connect(0.0).over, "slow is not dead"


def test_what_the_library_says_is_shown_when_asked_for(library, make, monkeypatch, capfd):
    library(
        method("batch_is_exist", "print('hear, hear', file=sys.stderr, flush=True)", "return [0]")
    )
    store = make()
    store.exists(["a"])
    assert "hear" not in capfd.readouterr().err
    # Nor is it gathered anywhere.
    assert os.readlink(f"/proc/{store._client._session._process.pid}/fd/2") == os.devnull
    monkeypatch.setenv("GLOG_minloglevel", "0")
    make().exists(["a"])
    assert "hear, hear" in capfd.readouterr().err


# --- opening -----------------------------------------------------------------------------------


def test_opening(library, master):
    config = TiersConfig(store="mooncake", path=master)
    require_store(config)
    ring = open_store(config)
    assert str(ring) == f"mooncake://{master}"
    [guarded] = ring.stores.values()
    assert isinstance(guarded, Breaker) and guarded.limits.step_bytes == 16 << 20
    assert ring.put(["a"], [page(1)]) == [True]
    ring.close()


def test_no_master():
    [port] = free_ports(1)
    config = TiersConfig(store="mooncake", path=f"127.0.0.1:{port}")
    for call in (open_store, require_store):
        with pytest.raises(MooncakeUnavailable) as caught:
            call(config, where="mimo.tiers")
        line = str(caught.value)
        assert line.startswith("mimo.tiers.path: ") and "\n" not in line
        if call is open_store or "library" not in line:
            assert f"no mooncake_master at 127.0.0.1:{port}" in line and "fix: start" in line


def test_what_is_open_is_closed_when_another_fails(library, master, spawned):
    [port] = free_ports(1)
    with pytest.raises(MooncakeUnavailable, match=f"mooncake://127.0.0.1:{port}"):
        open_mooncake([master, f"127.0.0.1:{port}"])
    [process] = spawned
    assert process.wait(PATIENT_S) == -signal.SIGKILL


# --- URLs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("host", "mooncake://host:50051"),
        ("host:1", "mooncake://host:1"),
        ("mooncake://HOST:7/", "mooncake://host:7"),
        ("mooncake://[::1]:7?protocol=rdma", "mooncake://[::1]:7"),
    ],
)
def test_names(url, name):
    assert parse_mooncake("url", url).name == name


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "mooncake://HOST:PORT"),
        ("redis://host", "mooncake://HOST:PORT"),
        ("host:port", "mooncake://HOST:PORT"),
        ("host:99999", "mooncake://HOST:PORT"),
        ("mooncake://host/folder", "mooncake://HOST:PORT"),
        ("mooncake://me@host", "mooncake://HOST:PORT"),
        ("host?devices=mlx5_0", "did you mean 'device'?"),
        ("host?protocol=tcp&protocol=rdma", "each option once"),
        ("host?protocol=udp", "tcp or rdma"),
        ("host?device=mlx5_0", "add protocol=rdma"),
        ("host?protocol=rdma&device=", "a name without spaces"),
        ("host?local=a b", "a name without spaces"),
        ("host?metadata=somewhere", "P2PHANDSHAKE or a URL of http"),
        ("host?metadata=ftp://host", "P2PHANDSHAKE or a URL of http"),
        ("host?metadata=http://", "P2PHANDSHAKE or a URL of http"),
        ("host?segment_gib=-1", "a number >= 0"),
        ("host?segment_gib=nan", "a number >= 0"),
        ("host?buffer_mib=7", "a whole number >= 8"),
        ("host?buffer_mib=8.5", "a whole number >= 8"),
        ("host?buffer_mib=much", "a whole number >= 8"),
    ],
)
def test_what_is_no_url(url, words):
    with pytest.raises(ConfigError) as caught:
        parse_mooncake("mimo.tiers.path", url)
    assert words in str(caught.value) and str(caught.value).startswith("mimo.tiers.path: ")


_NAME = st.from_regex(r"[a-z0-9_.]{1,12}", fullmatch=True)


@given(
    st.builds(
        MooncakeSettings,
        host=st.from_regex(r"[a-z][a-z0-9.-]{0,12}", fullmatch=True),
        port=st.integers(1, 65535),
        metadata=st.sampled_from(["P2PHANDSHAKE", "http://h:8080/metadata", "etcd://a:1"]),
        protocol=st.just("rdma"),
        device=st.one_of(st.just(""), _NAME),
        local=st.one_of(st.just(""), _NAME),
        segment_gib=st.floats(0, 1e6),
        buffer_mib=st.integers(8, 1 << 20),
    )
)
def test_what_is_written_in_a_url_is_read_from_it(settings):
    options = {
        name: getattr(settings, name)
        for name in ("metadata", "protocol", "device", "local", "segment_gib", "buffer_mib")
        if getattr(settings, name) != ""
    }
    query = "&".join(f"{name}={value}" for name, value in options.items())
    assert parse_mooncake("url", f"{settings.name}?{query}") == settings


def test_a_master_named_twice():
    with pytest.raises(ConfigError, match="each master once"):
        open_mooncake(["host:50051", "mooncake://host?protocol=rdma"])


def test_this_process_does_not_load_the_library(tmp_path):
    """In a process of its own: here, another test may have had vLLM load it."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(LIBRARY)
    script = (
        "import sys\n"
        "from mimo_plugin.tiers import mooncake_store\n"
        "mooncake_store.require_library()\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'mooncake'])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
