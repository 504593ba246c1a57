# SPDX-License-Identifier: Apache-2.0
"""What workers will have soon: the prompts that were just sent to them.

A request's prefix is resident when its prefill is done, some time before the worker's events say
so. A second request that is routed in between must count on it, or both prefill the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mimo_plugin.core.kv_events import Hash


@dataclass(slots=True)
class _Reserved:
    target: str
    hashes: Sequence[Hash]
    kept: tuple[int, ...]  # hashes up to each length that will be a hit, longest first
    expires_s: float


class Reservations:
    """Prompts on their way, by request.

    Args:
        hash_block_tokens: tokens of one hash.
        alignment_tokens: hits are multiples of it.
        every_block: hits may end at any aligned block, as in models without sliding windows.
            Otherwise only where the worker keeps a window: where the same prompt would hit, which
            its last token is no part of, and where the caller says.
    """

    def __init__(self, hash_block_tokens: int, alignment_tokens: int, *, every_block: bool) -> None:
        self._hash_tokens = hash_block_tokens
        self._aligned = alignment_tokens
        self._every_block = every_block
        self._all: dict[str, _Reserved] = {}
        # Prompts that differ in their first block share nothing.
        self._by_start: dict[Hash, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def align(self, alignment_tokens: int, hash_block_tokens: int) -> None:
        """Hits are multiples of something else from now on; what was on its way is forgotten."""
        self._hash_tokens, self._aligned = hash_block_tokens, alignment_tokens
        self._all.clear()
        self._by_start.clear()

    def add(
        self,
        request: str,
        target: str,
        hashes: Sequence[Hash],
        expires_s: float,
        kept_tokens: Iterable[int] = (),
        *,
        prompt_tokens: int,
    ) -> None:
        """A prompt was sent.

        Args:
            request: its id.
            target: where to.
            hashes: of its blocks, or of a beginning of them.
            expires_s: until when it counts.
            kept_tokens: where else its worker will keep windows.
            prompt_tokens: its length.
        """
        self.release(request)
        per_unit = self._aligned // self._hash_tokens
        whole = len(hashes) // per_unit * per_unit
        if not whole:
            return
        if self._every_block:
            lengths = {whole}
        else:
            kept_at = (*kept_tokens, prompt_tokens - 1)
            lengths = {tokens // self._aligned * per_unit for tokens in kept_at}
        kept = tuple(sorted((n for n in lengths if 0 < n <= whole), reverse=True))
        if not kept:
            return
        self._all[request] = _Reserved(target, hashes, kept, expires_s)
        self._by_start.setdefault(hashes[0], {})[request] = None

    def expire(self, request: str, expires_s: float) -> None:
        """The prompt counts until ``expires_s`` at most (its prefill is done, say)."""
        reserved = self._all.get(request)
        if reserved is not None:
            reserved.expires_s = min(reserved.expires_s, expires_s)

    def release(self, request: str) -> None:
        """It does not count any more."""
        reserved = self._all.pop(request, None)
        if reserved is not None:
            start = self._by_start[reserved.hashes[0]]
            del start[request]
            if not start:
                del self._by_start[reserved.hashes[0]]

    def release_target(self, target: str) -> None:
        """The target is gone, and all that was on its way to it."""
        for request in [r for r, reserved in self._all.items() if reserved.target == target]:
            self.release(request)

    def lookup(self, hashes: Sequence[Hash], max_hit_tokens: int, now_s: float) -> dict[str, int]:
        """What a prompt will hit, in tokens, on each target that something is on its way to."""
        found: dict[str, int] = {}
        if not hashes:
            return found
        longest = min(max_hit_tokens, len(hashes) * self._hash_tokens) // self._aligned
        longest = longest * self._aligned // self._hash_tokens
        for request in list(self._by_start.get(hashes[0], ())):
            reserved = self._all[request]
            if reserved.expires_s <= now_s:
                self.release(request)
                continue
            best = found.get(reserved.target, 0) // self._hash_tokens
            blocks = self._common(reserved, hashes, longest)
            if blocks > best:
                found[reserved.target] = blocks * self._hash_tokens
        return found

    def _common(self, reserved: _Reserved, hashes: Sequence[Hash], longest: int) -> int:
        """Blocks of the longest hit; each hash stands for its whole prefix, so one tells all."""
        theirs = reserved.hashes
        if not self._every_block:
            for blocks in reserved.kept:
                if blocks <= longest and theirs[blocks - 1] == hashes[blocks - 1]:
                    return blocks
            return 0
        per_unit = self._aligned // self._hash_tokens
        low, high = 0, min(reserved.kept[0], longest) // per_unit
        while low < high:
            middle = (low + high + 1) // 2
            if theirs[middle * per_unit - 1] == hashes[middle * per_unit - 1]:
                low = middle
            else:
                high = middle - 1
        return low * per_unit
