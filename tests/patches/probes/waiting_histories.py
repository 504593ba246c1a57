# SPDX-License-Identifier: Apache-2.0
"""Look up waiting requests through random histories of a small pool.

Each look-up is compared, block object by block object, with one that asks the coordinator afresh.
The same histories run on any source tree, so the digests of two trees can be compared as well.
Prints JSON, per geometry and length of the change record: ``lookups``, ``asked`` (look-ups that
went on to the coordinator), ``changed`` (look-ups with another result than the same request's last
one), ``hits``, ``events`` (KV events emitted), ``digest`` of all results and events, and
``mismatch`` (null or the first wrong look-up).
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from common import digest, hybrid_manager, request
from vllm.v1.core.block_pool import BlockHashToBlockMap

#: full block, SWA block, window, SWA groups, EAGLE, retention interval (tokens)
GEOMETRIES = {
    "full": (16, 16, 16, 0, False, None),
    "full_eagle": (16, 16, 16, 0, True, None),
    "mimo": (32, 16, 128, 2, False, 0),
    "mimo_dense": (32, 16, 64, 2, False, None),
    "mimo_eagle": (32, 16, 64, 2, True, 0),
    "same_blocks": (16, 16, 40, 1, False, 64),
    "large_swa_blocks": (16, 32, 64, 1, True, None),
}
#: lengths of the record of changes: as published, and one that overflows at once
RECORDS = (None, 6)
POOL_BLOCKS = 160
VOCABULARY = 3


class History:
    """Random requests over one manager: they wait, are admitted, grow, end, and come back."""

    def __init__(self, seed: int, geometry: tuple[Any, ...]) -> None:
        full, swa, window, groups, eagle, retention = geometry
        self.rng = random.Random(seed)
        self.unit = min(full, swa) if groups else full
        self.manager: Any = hybrid_manager(
            full_block_tokens=full,
            swa_block_tokens=swa if groups else full,
            window_tokens=window,
            swa_groups=groups,
            pool_blocks=POOL_BLOCKS,
            retention_tokens=retention,
            eagle=eagle,
        )
        self.manager.enable_kv_cache_events = True
        self.manager.block_pool.enable_kv_cache_events = True
        self.count = 0
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.last: dict[str, Any] = {}
        self.result: dict[str, Any] = dict.fromkeys(("lookups", "asked", "changed", "hits"), 0)
        self.result |= {"events": 0, "mismatch": None}
        self.seen = hashlib.sha256()
        self.ask = self.manager.coordinator.find_longest_cache_hit
        self.manager.coordinator.find_longest_cache_hit = self.count_ask

    def count_ask(self, *args: Any) -> Any:
        """The coordinator's own look-up, counted."""
        self.result["asked"] += 1
        return self.ask(*args)

    def tokens(self) -> list[int]:
        """A prompt: a path in a tree of few units, so that requests share prefixes."""
        out: list[int] = []
        for _ in range(self.rng.randint(1, 14)):
            out += [self.rng.randrange(VOCABULARY)] * (2 * self.unit)
        return out + [9] * self.rng.randrange(2 * self.unit)

    def arrive(self) -> None:
        """A new request waits; a waiting or running one may be asked again word by word."""
        known = self.waiting + self.running
        again = known and self.rng.random() < 0.4
        tokens = list(self.rng.choice(known).all_token_ids) if again else self.tokens()
        self.count += 1
        # An id may come back: a memo must not outlive its request.
        new = request(str(self.count % 40), tokens, self.unit)
        new.kv_cache_report_mode = self.rng.choice(("full", "incremental"))
        if all(new.request_id != other.request_id for other in known):
            self.waiting.append(new)

    def admit(self) -> None:
        """A waiting request gets its first chunk, if it fits."""
        if not self.waiting:
            return
        req = self.rng.choice(self.waiting)
        blocks, hit, boundary = self.look_up(req)
        chunk = min(req.num_tokens - hit, self.rng.choice((16, 48, 96, 512)))
        full = self.rng.random() < 0.5
        req.shared_prefix_boundary = boundary
        done = self.manager.allocate_slots(req, chunk, hit, blocks, full_sequence_must_fit=full)
        if done is not None:
            self.waiting.remove(req)
            self.running.append(req)
            req.num_computed_tokens = hit + chunk

    def run(self) -> None:
        """A running request computes a chunk, or decodes."""
        if not self.running:
            return
        req = self.rng.choice(self.running)
        if req.num_computed_tokens >= req.num_tokens:
            req.append_output_token_ids(self.rng.randrange(VOCABULARY))
        chunk = min(req.num_tokens - req.num_computed_tokens, self.rng.choice((16, 64, 512)))
        if self.manager.allocate_slots(req, chunk) is not None:
            req.num_computed_tokens += chunk

    def end(self) -> None:
        """A running request ends, or is preempted and waits again; a waiting one is aborted."""
        if self.rng.random() < 0.15 and self.waiting:
            self.manager.free(self.waiting.pop(self.rng.randrange(len(self.waiting))))
        if not self.running:
            return
        req = self.running.pop(self.rng.randrange(len(self.running)))
        self.manager.free(req)
        if self.rng.random() < 0.4:
            req.num_computed_tokens = 0
            self.waiting.append(req)

    def edit(self) -> None:
        """The end of a waiting request's tokens is replaced, as in a streaming session."""
        if not self.waiting:
            return
        req = self.rng.choice(self.waiting)
        kept = self.rng.randrange(req.num_tokens)
        length = req.num_tokens if self.rng.random() < 0.5 else kept + self.rng.randint(1, 64)
        more = [self.rng.randrange(VOCABULARY) for _ in range(length - kept)]
        req._all_token_ids[kept:] = more
        del req.block_hashes[kept // self.unit :]
        req.update_block_hashes()

    def disturb(self) -> None:
        """Blocks lose their hashes, or all do."""
        if self.rng.random() < 0.8:
            ids = self.rng.sample(range(1, POOL_BLOCKS), self.rng.randint(1, 4))
            self.manager.evict_blocks(set(ids))
            return
        for req in self.running:
            self.manager.free(req)
            req.num_computed_tokens = 0
        self.waiting += self.running
        self.running = []
        assert self.manager.reset_prefix_cache()

    def look_up(self, req: Any) -> Any:
        """Look ``req`` up and compare with a fresh look-up."""
        blocks, hit, boundary = found = self.manager.get_computed_blocks(req)
        groups, length, more = self.ask(req.block_hashes, req.num_tokens - 1)
        same = (hit, boundary) == (length, length + more if more else 0) and (
            not any(groups) if not any(blocks.blocks) else len(groups) == len(blocks.blocks)
        )
        for one, other in zip(blocks.blocks, groups, strict=True):
            same = same and len(one) == len(other)
            same = same and all(a is b for a, b in zip(one, other, strict=True))
        if not same and self.result["mismatch"] is None:
            self.result["mismatch"] = {"request": self.count, "hit": hit, "want": length}
        summary = (hit, boundary, blocks.get_block_ids())
        self.result["lookups"] += 1
        self.result["hits"] += hit > 0
        self.result["changed"] += self.last.get(req.request_id, summary) != summary
        self.last[req.request_id] = summary
        self.seen.update(digest((req.request_id, summary)))
        return found

    def play(self, steps: int) -> dict[str, Any]:
        """Run ``steps`` operations; returns the counts."""
        actions = (self.arrive, self.admit, self.run, self.end, self.edit, self.disturb)
        for _ in range(steps):
            (action,) = self.rng.choices(actions, weights=(20, 25, 40, 12, 4, 2))
            action()
            for req in self.waiting:
                if self.rng.random() < 0.7:
                    self.look_up(req)
            events = self.manager.take_events()
            self.result["events"] += len(events)
            self.seen.update(digest(events))
            while len(self.waiting) > 8:
                self.manager.free(self.waiting.pop(0))
        return self.result | {"digest": self.seen.hexdigest()}


def main() -> None:
    """Play histories of every geometry and record length."""
    results: dict[str, dict[str, Any]] = {}
    published = getattr(BlockHashToBlockMap, "MAX_CHANGES", None)
    for record in RECORDS:
        if published is not None:
            BlockHashToBlockMap.MAX_CHANGES = record or published
        for name, geometry in GEOMETRIES.items():
            total: dict[str, Any] = {}
            for seed in range(6):
                for key, value in History(seed, geometry).play(500).items():
                    if key == "mismatch":
                        total[key] = total.get(key) or value
                    else:
                        total[key] = total.get(key, type(value)()) + value
            results[f"{name}/{record}"] = total
    print(json.dumps(results))


if __name__ == "__main__":
    main()
