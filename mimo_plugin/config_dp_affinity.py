# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``dp_affinity``."""

from __future__ import annotations

from dataclasses import dataclass

from mimo_plugin.config_values import Validator, number, section, token_ids, whole


@dataclass(frozen=True, kw_only=True)
class DpAffinityConfig:
    """Settings of the feature ``dp_affinity``.

    Attributes:
        slack_requests: a rank ties with the least loaded one if it has at most so many running
            requests more, >= 0; one that waits counts as four.
        slack_share: or as many more as this part of what that one has, >= 0.
        spread: most chats of a rank as a multiple of an even share, >= 1; with one API process.
        session_ttl_s: how long a chat without requests is remembered, > 0.
        max_sessions: chats remembered in each API process, >= 1.
        answer_token_ids: tokens that open an answer, in this order; None takes them from the
            tokenizer's chat template, ``()`` looks for none.
    """

    slack_requests: int = 8
    slack_share: float = 0.25
    spread: float = 1.25
    session_ttl_s: float = 600.0
    max_sessions: int = 65_536
    answer_token_ids: tuple[int, ...] | None = None


_VALUES: dict[str, Validator] = {
    "slack_requests": whole(0, "requests"),
    "slack_share": number(least=0),
    "spread": number(least=1),
    "session_ttl_s": number(over=0),
    "max_sessions": whole(1, "chats"),
    "answer_token_ids": token_ids("to look for none"),
}


def parse_dp_affinity(where: str, raw: object) -> DpAffinityConfig:
    """The settings of the section ``where``.

    Raises:
        ConfigError: unknown key, wrong type, value out of range.
    """
    return DpAffinityConfig(**section(where, raw, _VALUES))
