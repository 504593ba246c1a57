# SPDX-License-Identifier: Apache-2.0
"""The scheduler feature's settings, with what can be derived from the engine's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from mimo_plugin.config import SchedulerConfig
from mimo_plugin.core.affinity import FCFS, AffinityRule
from mimo_plugin.core.cost import PrefillCost, parity_tokens_or_default
from mimo_plugin.core.lanes import Lane

logger = logging.getLogger("vllm.mimo_plugin")


def _lanes(config: SchedulerConfig) -> tuple[Lane, ...]:
    return tuple(Lane(lane.over_tokens, lane.max_prefills) for lane in config.lanes)


@dataclass(frozen=True, kw_only=True)
class SchedSettings(SchedulerConfig):
    """``SchedulerConfig`` made concrete; see ``config.py`` for the meaning of each field.

    Attributes:
        cost: prefill cost of the model.
    """

    lanes: tuple[Lane, ...] = _lanes(SchedulerConfig())  # type: ignore[assignment]
    cost: PrefillCost = PrefillCost(inf)

    @property
    def reorders(self) -> bool:
        """Whether anything but the engine's own order is asked for."""
        return self.mode != FCFS

    def rule(self, *, by_priority: bool) -> AffinityRule:
        """The order of the line."""
        return AffinityRule.of(self, self.lanes, by_priority=by_priority)


def resolve_sched_settings(config: SchedulerConfig, vllm_config: Any) -> SchedSettings:
    """Settings from a ``SchedulerConfig``; the prefill cost comes from the model's config."""
    parity, derived = parity_tokens_or_default(vllm_config.model_config.hf_text_config.to_dict())
    if not derived:
        logger.info(
            "mimo scheduler: the model's config.json does not tell how prefill cost grows with "
            "context; starting from %d tokens and measuring",
            parity,
        )
    given = {f.name: getattr(config, f.name) for f in fields(SchedulerConfig)}
    return SchedSettings(**{**given, "lanes": _lanes(config)}, cost=PrefillCost(parity))
