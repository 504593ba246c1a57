# SPDX-License-Identifier: Apache-2.0
"""How much of a step a long prefill may take."""

from __future__ import annotations

from typing import Any

from mimo_plugin.core.affinity import AffinityLine
from mimo_plugin.core.lanes import long_room_tokens
from mimo_plugin.engines.vllm.sched.hits import HitIndex
from mimo_plugin.engines.vllm.sched.settings import SchedSettings

#: passes for which a request that the engine skipped is not expected to start
SKIPPED_PASSES = 16


class LongChunks:
    """Cuts the chunks of prefills that are in a lane, where others can use the room.

    Args:
        scheduler: the scheduler whose steps these are.
        settings: the feature's settings.
        line: the waiting requests.
        hits: for the block pool and its block size.
    """

    def __init__(
        self, scheduler: Any, settings: SchedSettings, line: AffinityLine, hits: HitIndex
    ) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._lanes = settings.lanes if settings.reorders else ()
        self._line = line
        self._hits = hits
        #: running requests and free blocks when a pass ended for want of slots or blocks
        self._no_room: tuple[int, int] | None = None
        self.begin_pass(0)

    def begin_pass(self, number: int) -> None:
        """A step is about to be scheduled."""
        self._pass = number
        self._chunk_tokens: int | None = None
        self._room_tokens = 0
        self._granted_tokens = 0

    def nothing_fits(self) -> None:
        """A request was asked for and not taken: there is no slot, or there are no blocks."""
        self._no_room = self._room()

    def something_fits(self) -> None:
        """A request has started."""
        self._no_room = None

    def cut(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Tokens that ``request`` may compute in this step: fewer if it is a long prefill."""
        lanes, config = self._lanes, self._scheduler.scheduler_config
        if (
            not lanes
            or request.num_tokens - num_computed_tokens <= lanes[0].over_tokens
            or not config.enable_chunked_prefill
            # Images that must be computed whole were fitted into the chunk as it is.
            or (request.has_encoder_inputs and config.disable_chunked_mm_input)
        ):
            return num_new_tokens
        if self._chunk_tokens is None:
            self._chunk_tokens, self._room_tokens = self._work_out_long_chunk()
        least = self._hits.alignment_tokens
        left = self._room_tokens - self._granted_tokens
        tokens = min(num_new_tokens, max(least, min(self._chunk_tokens, left)))
        self._granted_tokens += tokens
        return tokens

    def _work_out_long_chunk(self) -> tuple[int, int]:
        """Tokens of a step for one long prefill, and for all of them."""
        scheduler, over = self._scheduler, self._lanes[0].over_tokens
        decodes = long = shorter_tokens = 0
        for request in scheduler.running:
            left = request.num_tokens - request.num_computed_tokens
            if left > over:
                long += 1
            elif request.is_prefill_chunk:
                shorter_tokens += left
            else:
                decodes += 1
        budget = scheduler.max_num_scheduled_tokens
        if shorter_tokens < budget and self._could_start():
            shorter_tokens += self._startable_tokens(over, budget - shorter_tokens)
        room = long_room_tokens(
            budget,
            share=self._settings.lane_share,
            decode_tokens=decodes * (1 + scheduler.num_spec_tokens),
            shorter_tokens=shorter_tokens,
        )
        return room // max(1, long), room

    def _room(self) -> tuple[int, int]:
        return len(self._scheduler.running), self._hits.pool.get_num_free_blocks()

    def _could_start(self) -> bool:
        """Whether a waiting request would find a slot and blocks, as far as the last pass shows."""
        if self._scheduler.pause_state.name != "UNPAUSED":
            return False
        if self._no_room is None:
            return True
        running, free_blocks = self._room()
        return running < self._no_room[0] or free_blocks > self._no_room[1]

    def _startable_tokens(self, over_tokens: int, most: int) -> int:
        """Tokens that waiting requests could compute in this step, at most ``most``.

        Those that are not longer than ``over_tokens``, and overdue ones of any length.
        """
        tokens = 0
        for entry in self._line.ready(over_tokens):
            # What the engine has just skipped (no adapter slot) will hardly start now.
            if self._pass - entry.skipped_pass > SKIPPED_PASSES:
                tokens += entry.uncached_tokens
                if tokens >= most:
                    return most
        return tokens
