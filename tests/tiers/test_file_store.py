# SPDX-License-Identifier: Apache-2.0
"""Pages as files: what is read is what was written, whatever happens in between."""

from __future__ import annotations

import os
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
