# SPDX-License-Identifier: Apache-2.0
"""The scheduler feature's settings, with what can be derived from the engine's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from mimo_plugin.core.affinity import COST, FCFS, AffinityRule
from mimo_plugin.core.cost import PrefillCost, parity_tokens_or_default
from mimo_plugin.core.lanes import Lane

logger = logging.getLogger("vllm.mimo_plugin")

_DEFAULT_LANES = (Lane(65_536, 2), Lane(262_144, 1))


@dataclass(frozen=True, slots=True)
class SchedSettings:
    """``SchedulerConfig`` made concrete; see ``config.py`` for the meaning of each field."""

    mode: str = COST
    age_credit: float = 0.25
    long_tokens: int = 12_288
    long_growth: float = 0.25
    hit_weight: float = 1.0
    max_wait_s: float = 300.0
    protect_hits: bool = True
    dedupe: bool = True
    lanes: tuple[Lane, ...] = _DEFAULT_LANES
    lane_share: float = 0.5
    scan_requests: int = 16
    calibrate: bool = True
    cost: PrefillCost = PrefillCost(float("inf"))

    @property
    def reorders(self) -> bool:
        """Whether anything but the engine's own order is asked for."""
        return self.mode != FCFS

    def rule(self, *, by_priority: bool) -> AffinityRule:
        """The order of the line."""
        return AffinityRule(
            mode=self.mode,
            age_credit=self.age_credit,
            long_tokens=self.long_tokens,
            long_growth=self.long_growth,
            hit_weight=self.hit_weight,
            max_wait_s=self.max_wait_s,
            by_priority=by_priority,
            lanes_over_tokens=tuple(lane.over_tokens for lane in self.lanes),
        )


def resolve_sched_settings(config: Any, vllm_config: Any) -> SchedSettings:
    """Settings from a ``SchedulerConfig``; the prefill cost comes from the model's config."""
    parity, derived = parity_tokens_or_default(vllm_config.model_config.hf_text_config.to_dict())
    if not derived:
        logger.info(
            "mimo scheduler: the model's config.json does not tell how prefill cost grows with "
            "context; starting from %d tokens and measuring",
            parity,
        )
    return SchedSettings(
        mode=config.mode,
        age_credit=config.age_credit,
        long_tokens=config.long_tokens,
        long_growth=config.long_growth,
        hit_weight=config.hit_weight,
        max_wait_s=config.max_wait_s,
        protect_hits=config.protect_hits,
        dedupe=config.dedupe,
        lanes=tuple(Lane(lane.over_tokens, lane.max_prefills) for lane in config.lanes),
        lane_share=config.lane_share,
        scan_requests=config.scan_requests,
        calibrate=config.calibrate,
        cost=PrefillCost(parity),
    )
