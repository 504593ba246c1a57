# SPDX-License-Identifier: Apache-2.0
"""vLLM's own KV cache manager plays a random history; an index listens to its events."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from vllm.distributed.kv_events import KVEventBatch

from mimo_plugin.core.block_hashes import PromptHasher
from mimo_plugin.core.named_index import NamedIndex
from mimo_plugin.engines.vllm.kv.settings import KvSettings
from mimo_plugin.router.event_wire import decode
from mimo_plugin.router.prompt import Prompt
from tests.kv.harness import KvHarness

MESSAGE_START = 1
_pack = msgspec.msgpack.Encoder().encode


class Player:
    """One engine without a model, and what an index knows of it.

    Args:
        groups: see :class:`KvHarness`.
        blocks: of the pool.
        plugin: with the feature ``kv``.
        retention: ``prefix_cache_retention_interval`` of stock.
    """

    def __init__(
        self,
        groups: Any,
        blocks: int,
        seed: int,
        *,
        plugin: bool = False,
        retention: int | None = 0,
        use_eagle: bool = False,
        unit: int | None = None,
        index: NamedIndex | None = None,
        name: str = "w",
    ) -> None:
        settings = KvSettings(
            message_start_token_ids=frozenset({MESSAGE_START}), ladder_min_tokens=12
        )
        self.kv = KvHarness(
            groups,
            blocks,
            plugin=settings if plugin else None,
            use_eagle=use_eagle,
            retention_interval=retention,
            max_in_flight_tokens=64,
        )
        self.kv.manager.enable_kv_cache_events = True
        self.kv.pool.enable_kv_cache_events = True
        ahead = dict.fromkeys(self.kv.lookahead_groups, 1)
        unit = unit or self.kv.hash_tokens
        # With the feature kv a batch need not name every group before the first window is kept.
        self.index = index or NamedIndex(
            unit, lookahead_blocks=ahead, num_groups=len(groups) if plugin else None
        )
        self.name = name
        self.hasher = PromptHasher(unit)
        self.rng = random.Random(seed)
        self.drafts = 2 if use_eagle else 0
        self.running: list[Any] = []
        self.known: list[list[int]] = [[MESSAGE_START, *range(300, 300 + 12)]]
        self.next_token = 1000
        self.seq = 0
        self.payloads: list[bytes] = []
        # All groups are heard of, and seen to have blocks of more than one hash.
        self.kv.run(self.fresh(4 * self.kv.alignment_tokens))

    def fresh(self, count: int) -> list[int]:
        """New tokens, some of which open a message."""
        first = self.next_token
        self.next_token += count
        return [MESSAGE_START if t % 7 == 0 else t for t in range(first, first + count)]

    def prompt(self) -> list[int]:
        """A new prompt: a chat's next turn, a fork, an edit, the same again, or a new one."""
        rng = self.rng
        base = rng.choice(self.known)
        kind = rng.random()
        if kind < 0.35:
            found = base + self.fresh(rng.randrange(1, 20))
        elif kind < 0.6:
            found = base[: rng.randrange(1, len(base) + 1)] + self.fresh(rng.randrange(1, 30))
        elif kind < 0.75:
            found = list(base)
        else:
            found = self.fresh(rng.randrange(2, 60))
        return found[:150]

    def listen(self) -> None:
        """Give the index what happened since."""
        events = self.kv.manager.take_events()
        if not events:
            return
        payload = _pack(KVEventBatch(ts=float(self.seq), events=events))
        self.payloads.append(payload)
        told, unknown = decode(payload)
        assert not unknown
        self.index.apply(self.name, self.seq, told)
        self.seq += 1

    def predicted(self, tokens: list[int]) -> int:
        """The hit that the index foretells."""
        prompt = Prompt(tokens, len(tokens))
        hits = self.index.lookup(self.hasher.hashes(prompt), len(tokens) - 1)
        return hits.get(self.name, 0)

    def look(self) -> tuple[int, int]:
        """Predicted and real hit of a prompt."""
        tokens = self.prompt()
        request = self.kv.request(tokens)
        return self.predicted(tokens), self.kv.look_up(request)[1]

    def act(self) -> None:
        """One operation of a scheduler."""
        rng, kv = self.rng, self.kv
        kind = rng.random()
        if kind < 0.3 and len(self.running) < 3:
            request = kv.request(self.prompt())
            if kv.admit(request, rng.randrange(1, 70), draft_tokens=self.drafts) is not None:
                self.running.append(request)
        elif self.running:
            request = rng.choice(self.running)
            if kind < 0.75:
                if request.num_computed_tokens >= request.num_tokens:
                    kv.append(request, self.fresh(1))
                if not kv.step(request, rng.randrange(1, 70), draft_tokens=self.drafts):
                    self.running.remove(request)
                    kv.preempt(request)
            elif kind < 0.95:
                self.running.remove(request)
                self.known.append(list(request.all_token_ids[: request.num_computed_tokens]))
                self.known = self.known[-10:]
                kv.finish(request)
            elif kind < 0.98:
                self.running.remove(request)
                kv.preempt(request)
            else:
                table = kv.coordinator.get_blocks(request.request_id)
                blocks = [b.block_id for b in table[rng.randrange(len(table))] if not b.is_null]
                if blocks and kv.plugin is None:
                    kv.manager.evict_blocks({rng.choice(blocks)})
        elif kind > 0.99:
            kv.manager.reset_prefix_cache()

    def play(self, steps: int) -> list[tuple[int, int]]:
        """Pairs of predicted and real hits, over a history of so many steps."""
        found = []
        for _ in range(steps):
            for _ in range(self.rng.randrange(1, 4)):
                self.act()
            self.listen()
            found.append(self.look())
        return found
