# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of the drafts: counters, and one warning when none is ever accepted."""

from __future__ import annotations

import logging
from typing import Any

from mimo_plugin.core.draft import OUTPUT_BINS, bin_of
from mimo_plugin.metrics import DRAFT_LENGTHS, DRAFT_POSITIONS, MetricsBuffer

logger = logging.getLogger("vllm.mimo_plugin")

_LAST = len(DRAFT_POSITIONS) - 1
_PER_TOKEN = ("mtp_drafted_tokens", "mtp_checked_tokens", "mtp_accepted_tokens")


class DraftReport:
    """Counts every drafted token once its fate is known.

    ``drafted = accepted + wasted`` at any time. Counting is a few list additions per request and
    step; labels are made when the counters are collected.

    Args:
        warn_after_drafts: verified drafts without a single accepted token after which a warning is
            logged; 0 for never.
    """

    def __init__(self, warn_after_drafts: int) -> None:
        self._warn_after = warn_after_drafts
        self._verified = self._accepted = 0
        self._buffer = MetricsBuffer()
        self._clear()

    def _clear(self) -> None:
        bins = range(len(OUTPUT_BINS))
        self._tokens = {n: [[0] * len(DRAFT_POSITIONS) for _ in bins] for n in _PER_TOKEN}
        self._rounds = [0 for _ in bins]
        self._lengths = [0] * len(DRAFT_LENGTHS)
        self._rejected = self._unverified = 0

    def proposed(self, length: int) -> None:
        """A request gets ``length`` drafted tokens."""
        self._lengths[min(length, len(DRAFT_LENGTHS) - 1)] += 1

    def verified(self, drafted: int, accepted: int, output_index: int) -> None:
        """One round.

        Args:
            drafted: drafted tokens that were verified, > 0.
            accepted: how many were accepted.
            output_index: index of the first of them in the request's output.
        """
        row = bin_of(output_index)
        tokens, checked, hits = (self._tokens[name][row] for name in _PER_TOKEN)
        for j in range(drafted):
            position = min(j, _LAST)
            tokens[position] += 1
            checked[position] += j <= accepted
            hits[position] += j < accepted
        self._rounds[row] += 1
        self._rejected += drafted - accepted
        self._verified += 1
        self._accepted += accepted
        if self._warn_after and not self._accepted and self._verified == self._warn_after:
            self._warn()

    def unverified(self, first: int, count: int, output_index: int) -> None:
        """``count`` tokens from position ``first`` on were drafted and never verified."""
        row = self._tokens["mtp_drafted_tokens"][bin_of(output_index)]
        for j in range(first, first + count):
            row[min(j, _LAST)] += 1
        self._unverified += count

    def handed_over(self, repeated_tokens: int, incomplete: bool) -> None:
        """A request goes on whose KV came from another engine.

        Args:
            repeated_tokens: tokens that are computed again for the MTP layers' sake.
            incomplete: some rows stay as the sender guessed them.
        """
        self._buffer.inc("mtp_handovers", complete="no" if incomplete else "yes")
        self._buffer.inc("mtp_handover_repeated_tokens", repeated_tokens)

    def _warn(self) -> None:
        self._buffer.inc("mtp_self_check_failures")
        logger.warning(
            "mimo mtp: found no accepted token in %d drafts, needed: some; likely causes: the MTP "
            "weights are not this model's or in a wrong format, an attention backend that reads "
            "the draft layers' KV in another layout, or prompts of random tokens; fix: check the "
            "checkpoint and --attention-backend, or leave out --speculative-config (outputs are "
            "right either way, without accepted drafts they only come slower)",
            self._verified,
        )

    def drain(self) -> dict[str, Any] | None:
        """Everything since the last call, None when nothing happened."""
        buffer = self._buffer
        for name, rows in self._tokens.items():
            for output, row in zip(OUTPUT_BINS, rows, strict=True):
                for position, count in zip(DRAFT_POSITIONS, row, strict=True):
                    if count:
                        buffer.inc(name, count, position=position, output=output)
        for output, count in zip(OUTPUT_BINS, self._rounds, strict=True):
            if count:
                buffer.inc("mtp_draft_rounds", count, output=output)
        for length, count in zip(DRAFT_LENGTHS, self._lengths, strict=True):
            if count:
                buffer.inc("mtp_draft_length", count, length=length)
        for reason, count in (("rejected", self._rejected), ("unverified", self._unverified)):
            if count:
                buffer.inc("mtp_wasted_drafts", count, reason=reason)
        self._clear()
        return buffer.drain()
