# SPDX-License-Identifier: Apache-2.0
"""The reader of KV events against vLLM's publisher: what is lost comes back, or counts as gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from mimo_plugin.core.block_hashes import block_hashes
from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.errors import ConfigError
from mimo_plugin.router import events as events_module
from mimo_plugin.router.event_wire import PayloadError, decode, parse, rank_endpoint
from mimo_plugin.router.events import EventReader

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]

UNIT = 4
LONG = list(range(1000))
HASHES = block_hashes(LONG, UNIT)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Engine:
    """vLLM's publisher, and blocks of one prompt that is stored piece by piece."""

    def __init__(self, *, replay: bool = True, kept: int = 10_000, first_name: int = 1) -> None:
        self.ports = free_ports(2)
        self.replay, self.kept, self.first_name = replay, kept, first_name
        self.blocks = 0
        self.publisher: Any = None

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay_endpoint(self) -> str | None:
        return f"tcp://127.0.0.1:{self.ports[1]}" if self.replay else None

    def start(self) -> Engine:
        from vllm.distributed.kv_events import ZmqEventPublisher

        self.blocks = 0
        replay = f"tcp://*:{self.ports[1]}" if self.replay else None
        self.publisher = ZmqEventPublisher(
            0, f"tcp://*:{self.ports[0]}", replay, buffer_steps=self.kept
        )
        return self

    def stop(self) -> None:
        self.publisher.shutdown()

    def send(self, *events: Any) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self.publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def grow(self, blocks: int = 2) -> None:
        """Store the next blocks of the prompt."""
        from vllm.distributed.kv_events import BlockStored

        first = self.blocks
        self.blocks += blocks
        self.send(
            BlockStored(
                block_hashes=[self.first_name + at for at in range(first, self.blocks)],
                parent_block_hash=self.first_name + first - 1 if first else None,
                token_ids=LONG[first * UNIT : self.blocks * UNIT],
                block_size=UNIT,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[None] * blocks,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )

    def shrink(self) -> None:
        """Remove its last block."""
        from vllm.distributed.kv_events import BlockRemoved

        self.blocks -= 1
        name = self.first_name + self.blocks
        self.send(BlockRemoved(block_hashes=[name], medium="GPU", group_idx=0))


class Listener:
    """A running reader."""

    def __init__(self, engine: Engine, index: NamedIndex | None = None, **options: Any) -> None:
        self.index = index or NamedIndex(UNIT)
        self.engine = engine
        self.changes: list[str] = []
        options.setdefault("replay_wait_s", 2.0)
        self.reader = EventReader(
            "w", engine.endpoint, engine.replay_endpoint, self.index, UNIT,
            on_change=self.changes.append, **options
        )  # fmt: skip
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Listener:
        self.task = asyncio.create_task(self.reader.run())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self.task is not None
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task

    @property
    def hit(self) -> int:
        """Blocks of the prompt that the index foretells."""
        return self.index.lookup(HASHES, len(LONG)).get("w", 0) // UNIT

    async def until(self, holds: Callable[[], bool], limit_s: float = 15.0) -> None:
        limit = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < limit, (self.hit, self.engine.blocks, self.reader.status)
            await asyncio.sleep(0.01)

    async def same(self) -> None:
        """Until the index knows what the engine has."""
        await self.until(lambda: self.hit == self.engine.blocks and self.reader.status["trusted"])


def play(script):
    """A coroutine as a test of its own loop and ZMQ context."""

    def test():
        async def run():
            context = zmq.asyncio.Context.instance()
            assert context is not None
            await script()

        asyncio.run(run())

    test.__name__, test.__doc__ = script.__name__, script.__doc__
    return test


@play
async def test_blocks_from_before_and_after_the_reader_came():
    engine = Engine().start()
    engine.grow()
    engine.grow()
    await asyncio.sleep(0.2)
    async with Listener(engine) as listener:
        await listener.same()
        assert listener.hit == 4
        engine.grow()
        await listener.same()
        engine.shrink()
        await listener.same()
        assert listener.hit == 5
        status = listener.reader.status
        assert status["batches"] == status["next_seq"] == 4 and not status["gaps"]
        assert status["connected"] and listener.changes and status["last_event_age_s"] < 5
    engine.stop()


@play
async def test_without_a_replay_address_only_what_is_new_counts():
    engine = Engine(replay=False).start()
    engine.grow()
    await asyncio.sleep(0.2)
    async with Listener(engine) as listener:
        await listener.until(lambda: listener.reader.status["connected"])
        await asyncio.sleep(0.3)
        engine.grow()  # of a parent that was stored before
        await listener.until(lambda: listener.reader.status["batches"] == 1)
        assert listener.hit == 0
        assert listener.index.name_counts("w").unknown_parents == 1
    engine.stop()


def dropping(listener: Listener, numbers: set[int]) -> None:
    """Lose live batches on the way."""
    real = listener.reader._live

    async def live(socket: Any, seq: int, payload: bytes) -> None:
        if seq not in numbers:
            await real(socket, seq, payload)

    listener.reader._live = live  # type: ignore[method-assign]


@play
async def test_lost_batches_are_asked_for():
    engine = Engine().start()
    listener = Listener(engine)
    dropping(listener, {2, 3, 6})
    async with listener:
        await listener.until(lambda: listener.reader.status["connected"])
        for _ in range(8):
            engine.grow()
            await asyncio.sleep(0.02)
        await listener.same()
        assert listener.hit == 16
        assert listener.reader.status["gaps"] == 2
        assert listener.reader.status["batches"] == 8
    engine.stop()


@play
async def test_a_lost_last_batch_is_found_when_it_is_quiet():
    engine = Engine().start()
    listener = Listener(engine)
    dropping(listener, {2})
    async with listener:
        await listener.until(lambda: listener.reader.status["connected"])
        for _ in range(2):
            engine.grow()
        await listener.same()
        engine.shrink()
        await listener.same()
        assert listener.hit == 3 and not listener.reader.status["gaps"]
    engine.stop()


@play
async def test_what_can_not_be_replayed_counts_as_gone():
    engine = Engine(kept=1).start()
    listener = Listener(engine)
    dropping(listener, {1, 2})
    async with listener:
        await listener.until(lambda: listener.reader.status["connected"])
        for _ in range(4):
            engine.grow()
            await asyncio.sleep(0.05)
        await listener.until(lambda: listener.reader.status["batches"] == 2)
        await listener.until(lambda: listener.reader.status["trusted"])
        assert listener.hit == 0
        assert listener.reader.status["next_seq"] == 4
    engine.stop()


@play
async def test_a_gap_without_a_replay_address_is_skipped_at_once():
    engine = Engine(replay=False).start()
    listener = Listener(engine)
    dropping(listener, {1})
    async with listener:
        await listener.until(lambda: listener.reader.status["connected"])
        await asyncio.sleep(0.3)
        for _ in range(3):
            engine.grow()
        await listener.until(lambda: listener.reader.status["next_seq"] == 3)
        assert listener.hit == 0 and listener.reader.status["trusted"]
    engine.stop()


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_that_starts_again_has_nothing(replay):
    async def script():
        engine = Engine(replay=replay).start()
        async with Listener(engine) as listener:
            await listener.until(lambda: listener.reader.status["connected"])
            await asyncio.sleep(0.3)
            for _ in range(3):
                engine.grow()
            await listener.same()
            engine.stop()
            await listener.until(lambda: not listener.reader.status["connected"])
            assert listener.hit == 0
            # As many batches as were seen: the next number is the one that was expected.
            engine.start()
            if replay:
                engine.grow(1)
                engine.shrink()
                engine.grow(1)
            await listener.until(lambda: listener.reader.status["connected"])
            await asyncio.sleep(0.3)
            engine.grow(1)
            if replay:
                await listener.same()
                assert listener.hit == 2
                assert listener.reader.status["restarts"] == 1
            else:
                await listener.same()
                assert listener.hit == 1
        engine.stop()

    asyncio.run(script())


@play
async def test_a_broken_connection_to_the_same_engine_costs_nothing():
    engine = Engine().start()
    proxy = await Proxy.to(engine)
    listener = Listener(engine)
    listener.reader.endpoint = f"tcp://127.0.0.1:{proxy.port}"
    async with listener:
        await listener.until(lambda: listener.reader.status["connected"])
        engine.grow()
        await listener.same()
        await proxy.cut()
        await listener.until(lambda: not listener.reader.status["connected"])
        assert listener.hit == 0
        engine.grow()
        engine.shrink()
        await proxy.open()
        await listener.same()
        assert listener.hit == 3
        assert listener.reader.status["restarts"] == 0
        assert listener.reader.status["connects"] == 2
    await proxy.cut()
    engine.stop()


class Proxy:
    """A TCP connection that can be cut."""

    def __init__(self, target: int) -> None:
        self.port = free_ports(1)[0]
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    @classmethod
    async def to(cls, engine: Engine) -> Proxy:
        proxy = cls(engine.ports[0])
        await proxy.open()
        return proxy

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, up_writer]
        await asyncio.gather(self._copy(reader, up_writer), self._copy(up_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


GARBAGE = [
    b"",
    b"\xff" * 40,
    msgspec.msgpack.encode({"no": "batch"}),
    msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": "x"}], 0]),
    msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "token_ids": [-1]}], 0]),
    msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "extra_keys": [[3]]}], 0]),
    msgspec.msgpack.encode([0.0, [[[]] * 3], 0]),
    b"\x91" * 100_000,
]


@pytest.mark.parametrize("payload", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused(payload):
    with pytest.raises(PayloadError):
        decode(payload)


def test_unknown_events_and_fields_are_skipped():
    batch = [
        0.0,
        [{"type": "BlockMoved", "x": 1}, {"type": "AllBlocksCleared", "new": {"field": 1}}],
        3,
        "more",
    ]
    events, unknown = decode(msgspec.msgpack.encode(batch))
    assert len(events) == 1 and unknown == 1


def test_frames():
    assert parse([b"topic", (7).to_bytes(8, "big"), b"p"]) == (7, b"p")
    assert parse([b"p"]) is None and parse([b"t", b"short", b"p"]) is None


def raw_publisher() -> tuple[Any, Engine]:
    engine = Engine(replay=False)
    pub = zmq.asyncio.Context.instance().socket(zmq.PUB)
    pub.bind(engine.endpoint)
    return pub, engine


@play
async def test_garbage_on_the_wire_is_counted_and_costs_what_was_known():
    pub, engine = raw_publisher()
    stored = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
        "token_ids": LONG[:8], "block_size": UNIT, "lora_id": None, "medium": "GPU",
        "lora_name": None,
    }  # fmt: skip
    good = msgspec.msgpack.encode([0.0, [stored], 0])
    async with Listener(engine) as listener:
        await listener.until(lambda: listener.reader.status["connected"])
        await asyncio.sleep(0.3)
        await pub.send_multipart([b"", (0).to_bytes(8, "big"), good])
        await listener.until(lambda: listener.hit == 2)
        await pub.send_multipart([b"only one frame"])
        await pub.send_multipart([b"", b"1", good])
        await listener.until(lambda: listener.reader.status["decode_errors"] == 2)
        assert listener.hit == 2
        await pub.send_multipart([b"", (1).to_bytes(8, "big"), b"\xc1garbage"])
        await listener.until(lambda: listener.reader.status["decode_errors"] == 3)
        assert listener.hit == 0
        await pub.send_multipart([b"", (2).to_bytes(8, "big"), good])
        await listener.until(lambda: listener.hit == 2)
        assert not listener.task.done()
    pub.close(linger=0)


@play
async def test_an_engine_that_is_not_there_yet():
    engine = Engine()
    async with Listener(engine) as listener:
        await asyncio.sleep(0.5)
        assert not listener.reader.status["connected"] and listener.hit == 0
        engine.start()
        engine.grow()
        await listener.same()
        assert listener.hit == 2
    engine.stop()


@play
async def test_a_snapshot_goes_on_where_it_ended_or_is_forgotten():
    engine = Engine(kept=3).start()
    async with Listener(engine) as listener:
        await listener.until(lambda: listener.reader.status["connected"])
        for _ in range(4):
            engine.grow()
        await listener.same()
        saved, last = listener.index.named_snapshot("w"), listener.reader.last
        assert last is not None and last[0] == 3
    engine.grow()

    def restored(digest: bytes) -> Listener:
        late = Listener(engine)
        late.index.restore_named("w", saved)
        late.index.suspend("w")
        late.reader.resume(digest)
        return late

    async with restored(last[1]) as late:
        await late.same()
        assert late.hit == 10
    async with restored(b"another") as late:
        await late.until(lambda: late.reader.status["batches"] == 3)
        assert late.hit == 0
    engine.stop()


@play
async def test_sixty_four_quiet_targets_cost_little():
    engines = [Engine().start() for _ in range(4)]
    index = NamedIndex(UNIT)
    readers = []
    for at in range(64):
        engine = engines[at % 4]
        readers.append(EventReader(f"w{at}", engine.endpoint, engine.replay_endpoint, index, UNIT))
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    for engine in engines:
        engine.grow(10)
    limit = time.monotonic() + 30
    while len(index.lookup(HASHES, len(LONG))) < 64:
        assert time.monotonic() < limit, len(index.lookup(HASHES, len(LONG)))
        await asyncio.sleep(0.05)
    assert set(index.lookup(HASHES, len(LONG)).values()) == {10 * UNIT}
    await asyncio.sleep(1.0)
    started = time.thread_time()
    await asyncio.sleep(3.0)
    assert time.thread_time() - started < 0.6
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for engine in engines:
        engine.stop()


def test_addresses_of_ranks_are_the_engine_s():
    from vllm.distributed.kv_events import ZmqEventPublisher

    theirs = ZmqEventPublisher.offset_endpoint_port
    for endpoint in ("tcp://127.0.0.1:5557", "tcp://[::1]:5557", "inproc://cache"):
        for rank in (0, 1, 7):
            assert rank_endpoint(endpoint, rank) == theirs(endpoint, rank)
    for endpoint in ("ipc:///tmp/x", "tcp://host", "tcp://host:65535"):
        with pytest.raises(ConfigError, match="events endpoint"):
            rank_endpoint(endpoint, 1)


def test_hash_sizes_must_agree():
    with pytest.raises(ValueError, match="hash_block_tokens"):
        EventReader("w", "tcp://127.0.0.1:1", None, NamedIndex(4), 8)


def test_quiet_checks_are_bounded():
    assert 0 < events_module.QUIET_S[0] < events_module.QUIET_S[1]
