# SPDX-License-Identifier: Apache-2.0
"""Pages as files: what is read is what was written, whatever happens in between."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo_plugin.errors import ConfigError
from mimo_plugin.tiers.file_store import HEADER_BYTES, FileStore, StoreError

ROOT = Path(__file__).resolve().parents[2]
PAGE_BYTES = 1000


def page(seed, sizes=(300, 700)):
    """The parts of a page with bytes of its own."""
    return [memoryview(bytearray((seed * 7 + i) % 256 for i in range(size))) for size in sizes]


def empty(sizes=(300, 700)):
    return [memoryview(bytearray(size)) for size in sizes]


def store(folder, pages=100, **options):
    return FileStore(folder, capacity_bytes=pages * (PAGE_BYTES + HEADER_BYTES), **options)


def age(target, key, seconds):
    """Make a page look as if it had been used so long ago."""
    path = target._path(key)
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime - seconds))


def test_what_is_written_is_read_by_another_process(tmp_path):
    first = store(tmp_path)
    assert first.put(["a", "b"], [page(1), page(2)]) == [True, True]
    code = (
        "import sys; from pathlib import Path\n"
        "from mimo_plugin.tiers.file_store import FileStore\n"
        "s = FileStore(Path(sys.argv[1]), capacity_bytes=10**6)\n"
        "p = [memoryview(bytearray(300)), memoryview(bytearray(700))]\n"
        "assert s.get(['b'], [p]) == [True]; print(bytes(p[1][:4]).hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == bytes(page(2)[1][:4]).hex()


def test_a_page_that_is_not_there_is_a_miss(tmp_path):
    target = store(tmp_path)
    assert target.get(["a"], [empty()]) == [False]
    assert target.exists(["a"]) == [False] and target.touch(["a"]) == [False]
    assert target.stats().pages_missed == 1


def test_any_key_is_a_name_and_none_is_another_s(tmp_path):
    target = store(tmp_path)
    keys = ["../../etc", "a/b", "a\0b", "x" * 5000, "", "é"]
    for seed, key in enumerate(keys):
        assert target.put([key], [page(seed)]) == [True]
    for seed, key in enumerate(keys):
        found = empty()
        assert target.get([key], [found]) == [True]
        assert found == page(seed)
    assert {path.parent.parent for path in tmp_path.rglob("*.page")} == {tmp_path}


def test_another_shape_of_the_same_bytes_is_read_too_another_size_is_not(tmp_path):
    target = store(tmp_path)
    target.put(["a"], [page(1, (300, 700))])
    found = empty((1000,))
    assert target.get(["a"], [found]) == [True]
    assert bytes(found[0]) == b"".join(bytes(part) for part in page(1))
    assert target.get(["a"], [empty((999,))]) == [False]
    assert target.stats().pages_damaged == 1 and target.exists(["a"]) == [False]


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "header", "nothing"])
def test_a_damaged_page_is_a_miss_and_goes(tmp_path, damage):
    target = store(tmp_path)
    target.put(["a"], [page(1)])
    path = target._path("a")
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-10]
    elif damage == "longer":
        data += b"x"
    elif damage == "flipped":
        data[500] ^= 1
    elif damage == "header":
        data[0] ^= 1
    else:
        data = bytearray()
    path.write_bytes(data)
    assert target.get(["a"], [empty()]) == [False]
    assert not path.exists() and target.stats().pages_damaged == 1
    assert target.put(["a"], [page(1)]) == [True]
    assert target.get(["a"], [empty()]) == [True]


@pytest.mark.parametrize("length", ["same", "cut", "longer"])
def test_damage_at_any_byte_is_a_miss(tmp_path, length):
    """Each byte of the file, its header included, inverted; and the file cut off behind it."""
    sizes = (60, 0, 90)
    target = store(tmp_path)
    target.put(["a"], [page(1, sizes)])
    path = target._path("a")
    whole = path.read_bytes()
    assert len(whole) == HEADER_BYTES + 150
    for at in range(len(whole)):
        if length == "same":
            data = bytearray(whole)
            data[at] ^= 0xFF
        else:
            data = whole[:at] if length == "cut" else whole + whole[: at + 1]
        path.write_bytes(data)
        assert target.get(["a"], [empty(sizes)]) == [False], at
        assert not path.exists()
    assert target.stats().pages_damaged == len(whole)
    path.write_bytes(whole)
    assert target.get(["a"], [empty(sizes)]) == [True]


WRITER = """
import hashlib, os, random, signal, sys, time
from pathlib import Path
from mimo_plugin.tiers.file_store import FileStore
folder, rounds, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(7)
for number in range(rounds):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        store = FileStore(folder, capacity_bytes=1 << 40)
        while True:
            for page in range(8):
                key = f"{number}-{page}"
                data = hashlib.blake2b(key.encode()).digest() * (size // 64)
                store.put([key], [[memoryview(data)]])
                os.write(write, b"x")
            store.get([f"{max(0, number - 1)}-0"], [[memoryview(bytearray(size))]])
    # From before it has opened the store, or from its first page on.
    if number % 2:
        os.read(read, 1)
    time.sleep(chance.uniform(0, 0.02 if number % 2 else 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read), os.close(write)
"""


def test_killed_writers_leave_whole_pages_or_none(tmp_path):
    """kill -9 at random points: what is there afterwards is what was written, and all can go on."""
    rounds, size = 30, 2 << 20
    subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), str(rounds), str(size)],
        check=True,
        cwd=ROOT,
        timeout=120,
    )
    target = FileStore(tmp_path, capacity_bytes=1 << 40)
    keys = [f"{number}-{n}" for number in range(rounds) for n in range(8)]
    there = 0
    for key in keys:
        data = hashlib.blake2b(key.encode()).digest() * (size // 64)
        found = memoryview(bytearray(size))
        if target.get([key], [[found]]) == [True]:
            assert found == data
            there += 1
    assert 0 < there < len(keys), "no kill came between the first page and the last"
    assert target.stats().pages_damaged == 0
    assert target.put(keys[:1], [[memoryview(bytes(size))]]) == [True]


def test_many_parts_are_more_than_one_call_takes(tmp_path):
    sizes = (3,) * 3000
    target = store(tmp_path)
    assert target.put(["a"], [page(5, sizes)]) == [True]
    found = empty(sizes)
    assert target.get(["a"], [found]) == [True]
    assert found == page(5, sizes)


def test_the_oldest_make_room_and_what_is_used_stays(tmp_path):
    target = store(tmp_path, pages=10)
    for number in range(10):
        target.put([f"{number}"], [page(number)])
        age(target, f"{number}", 1000 - number)
    assert target.touch(["0"]) == [True]
    assert target.get(["1"], [empty()]) == [True]
    target.put(["new"], [page(99)])
    left = [key for key in map(str, range(10)) if target.exists([key])[0]]
    assert {"0", "1"} <= set(left) and "2" not in left
    assert target.exists(["new"]) == [True]
    stats = target.stats()
    assert stats.pages_evicted == 11 - 9 and stats.bytes_held <= target.capacity_bytes


def test_writing_again_keeps_alive(tmp_path):
    target = store(tmp_path, pages=2)
    target.put(["a", "b"], [page(1), page(2)])
    for key in "ab":
        age(target, key, 100)
    assert target.put(["a"], [page(1)]) == [True]
    target.put(["c"], [page(3)])
    assert target.exists(["a", "b"])[1] is False
    assert target.stats().pages_put == 3


def test_what_others_wrote_counts(tmp_path):
    one, other = store(tmp_path, pages=10), store(tmp_path, pages=10)
    for number in range(9):
        one.put([f"{number}"], [page(number)])
    for number in range(9, 12):
        other.put([f"{number}"], [page(number)])
    total = sum(path.stat().st_size for path in tmp_path.rglob("*.page"))
    assert total <= other.capacity_bytes


def test_a_page_larger_than_the_store_is_dropped(tmp_path):
    target = store(tmp_path, pages=1)
    assert target.put(["a"], [page(1, (5000,))]) == [False]
    assert target.stats().pages_dropped == 1 and not list(tmp_path.rglob("*.part"))


def test_a_disk_that_fails_drops_and_does_not_raise(tmp_path, monkeypatch):
    target = store(tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    assert target.put(["a"], [page(1)]) == [False]
    assert target.stats().pages_dropped == 1 and not list(tmp_path.rglob("*.part"))


def failing(monkeypatch, name, number):
    """Have a call of the system fail for files of pages."""
    real = getattr(os, name)

    def call(path, *arguments, **named):
        if str(path).endswith((".page", ".part")):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("call", ["exists", "touch"])
def test_a_disk_that_fails_has_no_pages_or_raises(tmp_path, monkeypatch, call):
    plain, guarded = store(tmp_path), store(tmp_path, guarded=True)
    plain.put(["a"], [page(1)])
    failing(monkeypatch, {"exists": "stat", "touch": "utime"}[call], errno.EIO)
    assert getattr(plain, call)(["a"]) == [False]
    with pytest.raises(OSError, match="Input/output"):
        getattr(guarded, call)(["a"])


def test_a_guarded_store_raises_where_a_page_cannot_be_opened(tmp_path, monkeypatch):
    """Too many open files here: the page is in order, and stays."""
    plain, guarded = store(tmp_path), store(tmp_path, guarded=True)
    plain.put(["a"], [page(1)])

    def exhausted(*arguments, **named):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", exhausted)
        assert plain.get(["a"], [empty()]) == [False]
        with pytest.raises(OSError, match="Too many"):
            guarded.get(["a"], [empty()])
        with pytest.raises(OSError, match="Too many"):
            guarded.put(["b"], [page(2)])
    assert guarded.get(["a"], [empty()]) == [True]
    assert plain.stats().pages_damaged == guarded.stats().pages_damaged == 0


def test_a_guarded_store_reads_from_a_disk_that_went_read_only(tmp_path, monkeypatch):
    guarded = store(tmp_path, guarded=True)
    guarded.put(["a"], [page(1)])
    failing(monkeypatch, "utime", errno.EROFS)
    found = empty()
    assert guarded.get(["a"], [found]) == [True] and found == page(1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_failure(tmp_path, monkeypatch, number):
    guarded = store(tmp_path, guarded=True)

    def full(*arguments):
        raise OSError(number, "full")

    monkeypatch.setattr(os, "writev", full)
    assert guarded.put(["a"], [page(1)]) == [False]
    assert guarded.put(["b"], [page(1, (10**6,))]) == [False]
    assert guarded.stats().pages_dropped == 2


@pytest.mark.parametrize("left", ["nothing", "empty", "file"])
def test_a_guarded_store_whose_folder_has_gone_raises(tmp_path, left):
    folder = tmp_path / "store"
    guarded = store(folder, guarded=True)
    guarded.put(["a"], [page(1)])
    shutil.rmtree(folder)
    if left == "empty":
        folder.mkdir()
    elif left == "file":
        folder.write_text("")
    for call in (
        lambda: guarded.exists(["a"]),
        lambda: guarded.touch(["a"]),
        lambda: guarded.get(["a"], [empty()]),
        lambda: guarded.put(["a"], [page(1)]),
    ):
        with pytest.raises(OSError):
            call()
    # Nothing is made where the disk is missing: that would fill another one.
    assert left != "empty" or not list(folder.iterdir())


def test_a_guarded_store_makes_room_beside_its_calls(tmp_path):
    guarded = store(tmp_path, pages=10, guarded=True)
    for number in range(30):
        assert guarded.put([f"{number}"], [page(number)]) == [True]
    for thread in threading.enumerate():
        if thread.name == "mimo-tiers-room":
            thread.join(60)
    guarded._recount()
    held = sum(path.stat().st_size for path in tmp_path.rglob("*.page"))
    assert held <= guarded.capacity_bytes
    assert guarded.stats().pages_evicted >= 20


def test_what_an_interrupted_writer_left_goes(tmp_path):
    left = tmp_path / "00" / ".deadbeef.part"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    fresh = tmp_path / "00" / ".cafe.part"
    fresh.write_bytes(b"x")
    store(tmp_path)
    assert not left.exists() and fresh.exists()


def test_threads_share_a_store(tmp_path):
    target = store(tmp_path, pages=40)
    wrong = []

    def work(seed):
        for number in range(60):
            key = f"{(seed * 13 + number) % 50}"
            target.put([key], [page(int(key))])
            found = empty()
            if target.get([key], [found])[0] and found != page(int(key)):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and target.stats().pages_damaged == 0


def test_settings_and_folders_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match="capacity_bytes"):
        FileStore(tmp_path, capacity_bytes=0)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match=r"page store .*file: .*needed: a folder"):
        FileStore(blocked, capacity_bytes=1)


def test_closing_twice_is_fine(tmp_path):
    target = store(tmp_path)
    target.close()
    target.close()
    assert target.put(["a"], [page(1)]) == [True]


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(["put", "get", "touch"]), st.integers(0, 12))))
def test_random_histories(tmp_path_factory, steps):
    """What is read was written under that key; the store never holds more than it may."""
    target = store(tmp_path_factory.mktemp("store"), pages=6)
    written = set()
    for action, number in steps:
        key = f"{number}"
        if action == "put":
            assert target.put([key], [page(number)]) == [True]
            written.add(key)
        elif action == "touch":
            assert target.touch([key])[0] <= (key in written)
        else:
            found = empty()
            if target.get([key], [found])[0]:
                assert key in written and found == page(number)
        held = sum(path.stat().st_size for path in target.folder.rglob("*.page"))
        assert held <= target.capacity_bytes
