# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire, what is known of others, and the state of one process alone."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("msgspec")

from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.router.state import (
    Done,
    FirstToken,
    MemoryState,
    Sent,
    WorkerChanged,
    pack_hashes,
    unpack_hashes,
)
from mimo_plugin.router.state_peers import SEQ, WHOLE, OpenRequests, Peers, encode, field_of
from mimo_plugin.router.state_workers import SharedWorkers


@given(
    st.one_of(
        st.lists(st.integers(0, 2**64 - 1)),
        st.lists(st.integers(-(2**63), 2**63 - 1)),
        st.lists(st.binary(min_size=32, max_size=32), min_size=1),
    )
)
def test_hashes_come_back(hashes):
    kind, packed = pack_hashes(hashes)
    assert list(unpack_hashes(kind, packed)) == hashes
    assert len(packed) == len(hashes) * (8 if kind in "qQ" else 32)


@pytest.mark.parametrize("hashes", [[1, b"x"], [b"x", b"xy"], [2**64], [-1, 2**63], [b""]])
def test_hashes_of_several_kinds_are_refused(hashes):
    with pytest.raises(ValueError, match="several kinds or sizes"):
        pack_hashes(hashes)


@pytest.mark.parametrize(("kind", "data"), [("x", b""), ("Q", b"123"), ("0", b"1"), ("2", b"1")])
def test_what_is_no_packed_hashes_is_refused(kind, data):
    with pytest.raises(ValueError, match="packed hashes"):
        unpack_hashes(kind, data)


class Ears:
    """What a listener heard: what each process has in flight, and workers."""

    def __init__(self):
        self.flying, self.workers, self.left_ = {}, [], []

    def changed(self, process, change, at_s):
        mine = self.flying.setdefault(process, {})
        if isinstance(change, Done):
            mine.pop(change.id)  # was told before
        elif isinstance(change, FirstToken):
            mine[change.id].append("first")
        else:
            mine.setdefault(change.id, []).append(change.target)

    def left(self, process):
        self.left_.append(process)
        self.flying.pop(process, None)

    def worker_changed(self, change):
        self.workers.append(change)


class Speaker:
    """One process's changes, as the stream and its requests in flight would have them."""

    def __init__(self):
        self.seq, self.open, self.batches, self.truth = 0, OpenRequests(1000), [], {}

    def say(self, *changes):
        first = self.seq + 1
        for change in changes:
            self.seq += 1
            self.open.add(self.seq, change, 0.0)
            if isinstance(change, Done):
                self.truth.pop(change.id)
            elif isinstance(change, FirstToken):
                self.truth[change.id].append("first")
            else:
                self.truth.setdefault(change.id, []).append(change.target)
        self.batches.append(encode((first, [(0, change) for change in changes])))

    def fields(self):
        found = {field_of(name): self.open.field(name, lambda _: 0) for name in self.open.names()}
        return {**found, SEQ: str(self.seq).encode(), WHOLE: b"1"}


@settings(max_examples=300)
@given(data=st.data())
def test_whatever_is_lost_or_comes_twice_all_is_known_in_the_end(data):
    speaker, ears = Speaker(), Ears()
    peers = Peers(ears, ears.workers.append, lambda us: us / 1e6)
    heard = 0  # batches
    for _ in range(data.draw(st.integers(1, 25))):
        changes, flying = [], {name: None for name in speaker.truth}
        for _ in range(data.draw(st.integers(1, 4))):
            name = data.draw(st.sampled_from("abc"))
            if name not in flying or data.draw(st.integers(0, 3)) == 0:
                changes.append(Sent(name, data.draw(st.sampled_from("tu")), 1, 1.0, 1.0, "Q", b""))
                flying[name] = None
            elif data.draw(st.booleans()):
                changes.append(FirstToken(name, 1))
            else:
                changes.append(Done(name))
                del flying[name]
        speaker.say(*changes)
        act = data.draw(st.sampled_from(["hear", "hear", "wait", "lose", "twice", "drop"]))
        if act == "drop":
            peers.drop("p")
        elif act == "lose":
            heard = len(speaker.batches)
        elif act != "wait":
            if act == "twice":
                heard = max(0, heard - 2)
            for batch in speaker.batches[heard:]:
                if not peers.take("p", batch):
                    assert peers.load("p", speaker.fields())
            heard = len(speaker.batches)
            assert ears.flying.get("p", {}) == speaker.truth
    # The stream's end was lost: seen by two looks at the number.
    if peers.is_stuck("p", speaker.seq) or peers.is_stuck("p", speaker.seq):
        peers.load("p", speaker.fields())
    assert ears.flying.get("p", {}) == speaker.truth


def test_what_is_not_whole_is_not_believed():
    speaker, ears = Speaker(), Ears()
    peers = Peers(ears, ears.workers.append, lambda us: us / 1e6)
    speaker.say(Sent("a", "t", 1, 1.0, 1.0, "Q", b""))
    fields = speaker.fields()
    del fields[WHOLE]
    assert not peers.load("p", fields) and not peers.load("p", {}) and not ears.flying


def test_after_the_first_token_hashes_are_not_kept():
    kept = OpenRequests(2)
    kept.add(1, Sent("a", "t", 1, 1.0, 1.0, "Q", bytes(80_000), kept_tokens=(16,)), 0.0)
    assert len(kept.field("a", lambda _: 0)) > 80_000
    kept.add(2, FirstToken("a", 1), 0.0)
    assert len(kept.field("a", lambda _: 0)) < 100
    kept.add(3, Sent("b", "t", 1, 1.0, 1.0, "Q", b""), 0.0)
    assert kept.add(4, Sent("c", "t", 1, 1.0, 1.0, "Q", b""), 0.0) == ["c", "a"]
    assert kept.names() == ["b", "c"] and kept.field("a", lambda _: 0) is None


def test_removed_workers_are_forgotten_after_a_week():
    week_us, ears = 7 * 24 * 3600 * 1_000_000, Ears()
    workers = SharedWorkers(ears, "p", {})
    workers.stamp(WorkerChanged("http://w", removed=True), 5)
    written, old = workers.meet({}, week_us)
    assert set(written) == {"http://w"} and old == []
    assert workers.meet(written_as_read(written), week_us + 6) == ({}, ["http://w"])


def written_as_read(written):
    return {url.encode(): data for url, data in written.items()}


def test_a_worker_that_only_another_command_line_has_is_not_added():
    ears = Ears()
    workers = SharedWorkers(ears, "p", {"http://mine": {}})
    workers.merge(WorkerChanged("http://theirs", drained=True, at_us=1, by="q"))
    workers.merge(WorkerChanged("http://theirs", drained=False, at_us=2, by="q"))
    assert ears.workers == []
    workers.merge(WorkerChanged("http://mine", drained=True, at_us=2, by="q"))
    workers.merge(WorkerChanged("http://mine", drained=False, at_us=1, by="z"))  # older
    workers.merge(WorkerChanged("http://new", {"role": "both"}, added=True, at_us=1, by="q"))
    assert [(w.url, w.drained) for w in ears.workers] == [
        ("http://mine", True),
        ("http://new", False),
    ]


def test_memory_state_keeps_snapshots():
    async def scenario():
        state = MemoryState()
        await state.start(Ears(), {})
        state.publish(Done("1"))
        assert await state.load_snapshot("t") is None
        assert await state.save_snapshot("t", b"data") and await state.load_snapshot("t") == b"data"
        assert state.status["connected"] and state.status["peers"] == 0
        await state.close()

    asyncio.run(scenario())
