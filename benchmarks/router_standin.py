# SPDX-License-Identifier: Apache-2.0
"""A worker that computes nothing, for the CPU time of the router alone.

It answers chats with a stream of some tokens, and publishes the KV events that vLLM would: what is
new of a prompt is stored, its full-attention blocks and in every sliding-window group the window at
its end, and when the pool is full as many of the oldest blocks are removed. A real engine on the
same cores would slow the router down: what they share, caches above all, is the engine's then.

Run by :mod:`benchmarks.router_real`: ``python -m benchmarks.router_standin MODEL EVENTS --port=N``
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from typing import Any

BLOCK_TOKENS, FULL_BLOCK_TOKENS, WINDOW_TOKENS = 16, 32, 64
SWA_GROUPS = 3
STEP_TOKENS = 1024  # of one prefill step; each has a batch of events
ANSWER_CHUNKS = 8
HELD_BLOCKS = 20_000


class Engine:
    """What is published of prompts; of a session's next turn, only what is new.

    Args:
        model: folder with the tokenizer.
        publish: takes one batch of events.
    """

    def __init__(self, model: str, publish: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        self._publish, self._random = publish, random.Random(0)
        self._held: deque[tuple[int, bytes]] = deque()  # group and name, oldest first
        # Of each session's last prompt: its tokens, and the names of its full-attention blocks.
        self._last: dict[str, tuple[list[int], list[bytes]]] = {}

    def prefill(self, messages: list[dict[str, str]], session: str) -> tuple[int, int]:
        """Length of the prompt and of its hit; its events are out."""
        encoded = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        tokens = list(encoded["input_ids"])
        before, names = self._last.get(session, ([], []))
        same = next(
            (i for i, (a, b) in enumerate(zip(tokens, before, strict=False)) if a != b),
            min(len(tokens), len(before)),
        )
        kept = min(same, len(tokens) - 1) // FULL_BLOCK_TOKENS
        names = names[:kept]
        hit = kept * FULL_BLOCK_TOKENS
        for start in range(hit, len(tokens), STEP_TOKENS):
            step = tokens[start : start + STEP_TOKENS]
            events: list[Any] = []
            whole = len(step) // FULL_BLOCK_TOKENS * FULL_BLOCK_TOKENS
            if whole:
                new = self._names(0, whole // FULL_BLOCK_TOKENS)
                parent = names[-1] if names else None
                events.append(_stored(0, new, parent, step[:whole], FULL_BLOCK_TOKENS))
                names += new
            if start + STEP_TOKENS >= len(tokens) and whole >= WINDOW_TOKENS:
                for group in range(1, 1 + SWA_GROUPS):
                    new = self._names(group, WINDOW_TOKENS // BLOCK_TOKENS)
                    window = step[whole - WINDOW_TOKENS : whole]
                    events.append(_stored(group, new, None, window, BLOCK_TOKENS))
            events = [*self._removed(), *events]
            if events:
                self._publish(events)
        self._last[session] = tokens, names
        return len(tokens), hit

    def _names(self, group: int, count: int) -> list[bytes]:
        names = [self._random.randbytes(32) for _ in range(count)]
        self._held.extend((group, name) for name in names)
        return names

    def _removed(self) -> list[Any]:
        from vllm.distributed.kv_events import BlockRemoved

        found = []
        while len(self._held) > HELD_BLOCKS:
            group, name = self._held.popleft()
            found.append(BlockRemoved(block_hashes=[name], medium="GPU", group_idx=group))
        return found


def _stored(
    group: int, names: list[bytes], parent: bytes | None, tokens: list[int], block_tokens: int
) -> Any:
    from vllm.distributed.kv_events import BlockStored

    event = BlockStored(
        block_hashes=names,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=block_tokens,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * len(names),
        group_idx=group,
    )
    event.kv_cache_spec_kind = "sliding_window" if group else "full_attention"
    event.kv_cache_spec_sliding_window = WINDOW_TOKENS if group else None
    return event


async def serve(model: str, port: int, endpoint: str) -> None:
    """Until the process ends."""
    import msgspec
    import zmq
    from aiohttp import web
    from vllm.distributed.kv_events import KVEventBatch

    socket: Any = zmq.Context.instance().socket(zmq.PUB)
    socket.bind(endpoint)
    encode, number = msgspec.msgpack.Encoder().encode, 0

    def publish(events: list[Any]) -> None:
        nonlocal number
        batch = encode(KVEventBatch(ts=time.time(), events=events, data_parallel_rank=0))
        socket.send_multipart([b"", number.to_bytes(8, "big"), batch])
        number += 1

    engine = Engine(model, publish)

    async def models(request: web.Request) -> web.Response:
        card = {"id": model, "object": "model", "root": model, "max_model_len": 131072}
        return web.json_response({"object": "list", "data": [card]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        length, hit = engine.prefill(body["messages"], request.headers.get("X-Session-ID", ""))
        usage = {"prompt_tokens": length, "prompt_tokens_details": {"cached_tokens": hit}}
        if not body.get("stream"):
            choice = {"message": {"role": "assistant", "content": "bo"}}
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(ANSWER_CHUNKS):
            chunk = {"id": "x", "choices": [{"index": 0, "delta": {"content": " bo"}}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0.01)
        last = {"id": "x", "choices": [], "usage": usage}
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/version", version)
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    """Serve."""
    words = [word for word in sys.argv[1:] if not word.startswith("--host")]
    model, endpoint, port = words[0], words[1], int(words[2].removeprefix("--port="))
    asyncio.run(serve(model, port, endpoint))


if __name__ == "__main__":
    main()
