# SPDX-License-Identifier: Apache-2.0
"""Puts the affinity queue into a scheduler, and takes it out again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    create_request_queue,
)

from mimo_plugin.engines.vllm.sched.extension import extended
from mimo_plugin.engines.vllm.sched.queue import AffinityQueue
from mimo_plugin.engines.vllm.sched.settings import SchedSettings
from mimo_plugin.engines.vllm.sched.timing import StepClock
from mimo_plugin.errors import FeatureUnavailable


def install(
    scheduler: Any,
    settings: SchedSettings,
    *,
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Give ``scheduler`` an affinity queue. May be called again with other settings.

    Args:
        scheduler: an instance of an ``extended`` class, or of any class derived from vLLM's
            ``Scheduler`` (it then becomes an instance of the extended class).
        settings: the feature's settings.
        clock_s: monotonic seconds.

    Raises:
        ValueError: requests are waiting; their place in the queue would be lost.
        FeatureUnavailable: the scheduler class brings a waiting queue of its own.
    """
    found = type(getattr(scheduler, "waiting", None))
    if found not in (FCFSRequestQueue, PriorityRequestQueue, AffinityQueue):
        raise FeatureUnavailable(
            f"the scheduler class {type(scheduler).__name__} brings a waiting "
            f"queue of its own ({found.__name__}), whose order would be lost; needed: vLLM's own "
            "queue; fix: leave scheduler out of --plugin mimo:…, or drop --scheduler-cls"
        )
    if len(scheduler.waiting):
        raise ValueError(f"{len(scheduler.waiting)} requests are waiting; install on an idle queue")
    _detach(scheduler)
    if not hasattr(scheduler, "affinity_payload"):
        scheduler.__class__ = extended(scheduler.__class__)
    queue = AffinityQueue(scheduler, settings, clock_s)
    scheduler.step_clock = StepClock(settings.cost, clock_s, settings.calibrate)
    scheduler.affinity = scheduler.waiting = queue


def remove(scheduler: Any) -> None:
    """Put the stock queue back. Raises ValueError when requests are waiting."""
    if len(scheduler.waiting):
        raise ValueError(f"{len(scheduler.waiting)} requests are waiting; remove on an idle queue")
    _detach(scheduler)
    scheduler.affinity = scheduler.step_clock = None
    scheduler.waiting = create_request_queue(scheduler.policy)


def _detach(scheduler: Any) -> None:
    queue = getattr(scheduler, "affinity", None)
    if queue is not None:
        queue.hits.detach()
