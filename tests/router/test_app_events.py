# SPDX-License-Identifier: Apache-2.0
"""The router with workers that publish KV events, and what it keeps of them for other routers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.router.events import EventReader
from mimo_plugin.router.snapshots import pack, unpack
from tests.router.redis_server import RedisServer
from tests.router.test_app_proxy import in_loop
from tests.router.workers import MODEL, FakeWorker, FakeWorkerAlias, Front, routing, until

pytestmark = pytest.mark.timeout(60)

BLOCK = 16


class Publisher:
    """A worker's events, as vLLM publishes them; keeps the last ``kept`` batches for replays."""

    def __init__(self, kept: int = 1000) -> None:
        context = zmq.asyncio.Context.instance()
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.kept, self.seq = kept, 0
        self._batches: list[tuple[int, bytes]] = []
        self._names = 0
        self._task = asyncio.create_task(self._answer())

    def source(self) -> dict[str, Any]:
        return {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }

    async def publish(self, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), None])
        self._batches = [*self._batches, (self.seq, payload)][-self.kept :]
        await self._pub.send_multipart([b"", self.seq.to_bytes(8, "big"), payload])
        self.seq += 1

    async def store(self, tokens: list[int], parent: int | None = None) -> list[int]:
        """Whole blocks of a prompt; their names."""
        count = len(tokens) // BLOCK
        names = [self._names + 1 + i for i in range(count)]
        self._names += count
        await self.publish(
            {
                "type": "BlockStored",
                "block_hashes": names,
                "parent_block_hash": parent,
                "token_ids": tokens[: count * BLOCK],
                "block_size": BLOCK,
                "medium": "GPU",
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        return names

    async def remove(self, names: list[int]) -> None:
        event = {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0}
        await self.publish(event)

    def close(self) -> None:
        self._task.cancel()
        self._pub.close()
        self._router.close()

    async def _answer(self) -> None:
        while True:
            sender, _, start = await self._router.recv_multipart()
            for seq, payload in self._batches:
                if seq >= int.from_bytes(start, "big"):
                    frames = [sender, b"", seq.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart([sender, b"", end, b""])


async def worker_with(publisher: Publisher) -> FakeWorker:
    worker = FakeWorker()
    worker.metrics = f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0"}} 1.0\n'
    worker.extra["/kv_event_sources"] = {"0": publisher.source()}
    return await worker.start()


async def resident(front: Front, tokens: list[int]) -> dict[str, int]:
    url = front.url + "/resident"
    async with front.client.post(url, json={"prompt": tokens}) as response:
        assert response.status == 200
        targets = (await response.json())["targets"]
    return {name: target["hit_tokens"] for name, target in targets.items()}


async def see(front: Front, worker: FakeWorker, tokens: list[int], expected: int) -> None:
    """Wait until the router believes in a hit of that length."""
    for _ in range(300):
        if (await resident(front, tokens)).get(worker.url) == expected:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{await resident(front, tokens)}, not {expected}")


async def ask(front: Front, tokens: list[int]) -> tuple[str, int]:
    body = {"model": MODEL, "prompt": tokens}
    async with front.client.post(front.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        return response.headers["X-Mimo-Worker"], int(response.headers["X-Mimo-Predicted-Hit"])


@in_loop
async def test_a_prompt_goes_where_its_blocks_are() -> None:
    publishers = [Publisher(), Publisher()]
    first, second = [await worker_with(publisher) for publisher in publishers]
    async with routing(first, second) as front:
        tokens = list(range(1000, 1000 + 100 * BLOCK))
        names = await publishers[0].store(tokens[: 60 * BLOCK])
        await publishers[1].store(tokens[: 30 * BLOCK])
        await see(front, first, tokens, 60 * BLOCK)
        await see(front, second, tokens, 30 * BLOCK)
        assert await ask(front, tokens) == (first.url, 60 * BLOCK)
        workers = (await front.get("/workers"))[1]["workers"]
        assert all(worker["exact"] for worker in workers)
        assert workers[0]["targets"][0]["blocks"] == 60
        assert await front.metric("mimo_router:index_blocks", target=first.url) == 60
        await asyncio.sleep(0.6)  # what was sent there is forgotten
        await publishers[0].remove(names[10:])
        await see(front, first, tokens, 10 * BLOCK)
        front.app.service.router.loads[first.url].work_s = 0.0
        assert await ask(front, tokens) == (second.url, 30 * BLOCK)
    for publisher in publishers:
        publisher.close()


@in_loop
async def test_the_blocks_of_two_block_sizes_are_hashed_by_what_they_share() -> None:
    publisher, other = Publisher(), Publisher()
    fine, coarse = await worker_with(publisher), await worker_with(other)
    coarse.metrics = 'vllm:cache_config_info{block_size="24",engine="0"} 1.0\n'
    async with routing(fine, coarse) as front:
        assert front.app.service.knowledge.hash_tokens == 8
        tokens = list(range(40 * BLOCK))
        await publisher.store(tokens[: 20 * BLOCK])
        await see(front, fine, tokens, 20 * BLOCK)
    publisher.close()
    other.close()


@in_loop
async def test_a_router_that_starts_late_has_what_another_one_kept() -> None:
    redis = RedisServer()
    redis.start()
    try:
        publisher = Publisher(kept=3)
        worker = await worker_with(publisher)
        tokens = list(range(80 * BLOCK))
        async with routing(worker, state=redis.url) as first:
            saver = first.app.service.knowledge.saver
            await until(lambda: first.app.service.knowledge.is_exact(worker.url))
            names = await publisher.store(tokens[: 40 * BLOCK])
            for number in range(5):
                other = list(range(10_000 + number * BLOCK, 10_000 + (number + 1) * BLOCK))
                await publisher.store(other)
            await see(first, worker, tokens, 40 * BLOCK)
            async with routing(FakeWorkerAlias(worker), state=redis.url) as without:
                await until(lambda: without.app.service.knowledge.is_exact(worker.url))
                await asyncio.sleep(0.1)
                assert (await resident(without, tokens))[worker.url] == 0
            saver.replayed_batches = 0
            await saver.save(worker.url)
            assert saver.saves == 1
            # What comes after the snapshot is asked for; what came before it is in it.
            await publisher.remove(names[30:])
            async with routing(FakeWorkerAlias(worker), state=redis.url) as second:
                await see(second, worker, tokens, 30 * BLOCK)
            for number in range(5):
                other = list(range(20_000 + number * BLOCK, 20_000 + (number + 1) * BLOCK))
                await publisher.store(other)
            # The publisher no longer has the snapshot's last batch: nothing is believed.
            async with routing(FakeWorkerAlias(worker), state=redis.url) as third:
                await until(lambda: third.app.service.knowledge.is_exact(worker.url))
                await asyncio.sleep(0.1)
                assert (await resident(third, tokens))[worker.url] == 0
        publisher.close()
    finally:
        redis.kill()


def test_a_snapshot_of_another_kind_is_none() -> None:
    index = NamedIndex(BLOCK)
    reader = EventReader("w", "tcp://127.0.0.1:1", None, index)
    assert pack(index, "w", b"d") is None
    index.apply("w", 0, [])
    data = pack(index, "w", b"d")
    assert data is not None
    found = unpack(data, BLOCK)
    assert found is not None and found[1] == b"d" and found[0].blocks.next_seq == 1
    assert unpack(data, 2 * BLOCK) is None
    for wrong in (b"", data[:-3], b"\xc1" * 10, msgspec.msgpack.encode([1, 2])):
        assert unpack(wrong, BLOCK) is None
    assert reader.last is None
    index.restore_named("w", found[0])
    reader.resume(b"d")
    assert reader.last == (0, b"d")
