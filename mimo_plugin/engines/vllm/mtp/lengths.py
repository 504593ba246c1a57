# SPDX-License-Identifier: Apache-2.0
"""The scheduler methods around which draft lengths are decided and drafts are counted.

vLLM's scheduler asks for drafts in two ways. With async scheduling it hands each request a list of
placeholders as soon as a step is scheduled; without, the drafts come back when the step is done.
Either way a request verifies as many drafts as its ``spec_token_ids`` has entries, and the worker
takes the first of what it drafted. So a shorter list is a shorter draft, and a step's
``num_spec_tokens_to_schedule`` is the most that any of its requests needs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from mimo_plugin.config import MtpConfig
from mimo_plugin.core.acceptance import RequestAcceptance
from mimo_plugin.core.draft import LengthPlanner, draft_room
from mimo_plugin.engines.vllm.mtp.report import DraftReport

logger = logging.getLogger("vllm.mimo_plugin")

#: steps that may be under way before the oldest is taken for lost
_MOST_STEPS = 64


@dataclass(frozen=True, kw_only=True)
class MtpSettings:
    """What the scheduler needs to know of the feature.

    Attributes:
        adaptive_length: choose lengths by measured acceptance and batch size.
        warn_after_drafts: drafts without any accepted token that cause a warning; 0: never.
        limit_tokens: positions that the draft layers have; None where the target ends before.
    """

    adaptive_length: bool = False
    warn_after_drafts: int = 200
    limit_tokens: int | None = None


def resolve_mtp_settings(config: MtpConfig, vllm_config: Any) -> MtpSettings | None:
    """Settings from a ``MtpConfig``; None for an engine that does not draft with MTP layers."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "mtp":
        return None
    adaptive, ranks = config.adaptive_length, vllm_config.parallel_config.data_parallel_size
    if adaptive and ranks > 1:
        # The ranks' steps have one shape; lengths that each chooses for itself would break it.
        logger.warning(
            "mimo mtp: adaptive_length is left out: found --data-parallel-size %d, needed: 1; "
            "fix: --speculative-config's num_speculative_tokens_per_batch_size sets lengths there",
            ranks,
        )
        adaptive = False
    return MtpSettings(
        adaptive_length=adaptive,
        warn_after_drafts=config.warn_after_drafts,
        limit_tokens=_limit_tokens(vllm_config),
    )


def _limit_tokens(vllm_config: Any) -> int | None:
    """Positions that the draft layers have, None when the target model has no more than these."""
    spec = vllm_config.speculative_config
    draft = spec.draft_model_config
    limits = [spec.max_model_len or draft.max_model_len]
    positions = getattr(draft.hf_config, "max_position_embeddings", None)
    if positions:
        limits.append(positions)
    limit = min(limits)
    return None if limit >= vllm_config.model_config.max_model_len else limit


@dataclass(slots=True, eq=False)
class _Drafting:
    """A request that decodes."""

    request: Any
    acceptance: RequestAcceptance | None
    length: int  # tokens to draft after the current step
    proposed: int = 0  # drafted tokens that no step verifies yet


@dataclass(slots=True, eq=False)
class _Step:
    """A step under way. ``rounds``: request id -> its state and drafted tokens being verified."""

    output: Any
    started_s: float
    tokens: int = 0
    shape: int | None = None
    only_decodes: bool = True
    rounds: dict[str, tuple[_Drafting, int]] = field(default_factory=dict)


class DraftControl:
    """Draft lengths and counters of one scheduler.

    Args:
        scheduler: the scheduler whose drafts these are.
        settings: the feature's settings.
        clock_s: monotonic seconds.
    """

    def __init__(
        self, scheduler: Any, settings: MtpSettings, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._places_ahead = isinstance(scheduler, AsyncScheduler)
        self._limit = settings.limit_tokens
        self._clock_s = clock_s
        self.report = DraftReport(settings.warn_after_drafts)
        k = scheduler.num_spec_tokens
        self.planner = LengthPlanner(k) if settings.adaptive_length else None
        self._states: dict[str, _Drafting] = {}
        self._steps: deque[_Step] = deque()
        self._current: _Step | None = None
        self._decodes: list[_Drafting] = []
        self._started_s = self._last_end_s = 0.0

    # -- a step is scheduled ----------------------------------------------------------------------

    def scheduling(self) -> None:
        """A step begins to be scheduled."""
        self._started_s = self._clock_s()

    def scheduled(self, output: Any) -> None:
        """A step was scheduled, and the scheduler's own state not advanced yet.

        Decides how many tokens are drafted after it, and asks the worker for no more.
        """
        step = _Step(output, self._started_s, tokens=output.total_num_scheduled_tokens)
        verified = output.scheduled_spec_decode_tokens
        bound = output.num_spec_tokens_to_schedule
        decodes, limits, shapes, other_tokens = [], [], set(), 0
        for name, count in output.num_scheduled_tokens.items():
            request, drafts = self._scheduler.requests[name], len(verified.get(name, ()))
            known = request.num_tokens + request.num_output_placeholders
            step.only_decodes &= count == 1 + drafts
            shapes.add(drafts)
            state = self._states.get(name)
            if state is not None and (state.proposed or drafts):
                self._verifies(step, state, drafts)
            if request.num_computed_tokens + count < known:
                other_tokens += count
                continue
            decodes.append(state or self._new_state(request))
            # If all is accepted, the next draft starts behind so many tokens.
            limits.append(draft_room(known + 1 + drafts, bound, self._limit))
        step.shape = shapes.pop() if len(shapes) == 1 else None
        self._steps.append(step)
        self._forget_lost_steps()
        self._decodes = decodes
        self._decide(output, limits, other_tokens)

    def _verifies(self, step: _Step, state: _Drafting, drafts: int) -> None:
        """``drafts`` entries of a request are verified in ``step``.

        Without tokens that were drafted for it they are padding, by which vLLM gives a request that
        has just been admitted the shape of the others.
        """
        taken = min(drafts, state.proposed)
        if taken:
            step.rounds[state.request.request_id] = state, taken
        self._wasted(state, taken, state.proposed - taken)
        state.proposed = 0

    def _decide(self, output: Any, limits: list[int], other_tokens: int) -> None:
        decodes, bound = self._decodes, output.num_spec_tokens_to_schedule
        lengths = limits
        if self.planner is not None:
            known = [state.acceptance for state in decodes if state.acceptance is not None]
            lengths = list(self.planner.plan(known, limits, other_tokens))
        for state, length in zip(decodes, lengths, strict=True):
            state.length = length
        if decodes and max(lengths) < bound:
            output.num_spec_tokens_to_schedule = max(lengths)

    def advanced(self) -> None:
        """The scheduler has advanced its state: with async scheduling, placeholders are there."""
        for state in self._decodes:
            # The list is one for all requests: it is replaced and never changed.
            placeholders = state.request.spec_token_ids
            if placeholders:
                if len(placeholders) > state.length:
                    state.request.spec_token_ids = placeholders[: state.length]
                state.proposed = len(state.request.spec_token_ids)
            if self._places_ahead:
                self.report.proposed(state.proposed)
        self._decodes = []

    def drafted(self, draft_token_ids: Any) -> None:
        """Drafts came back from the worker and lie at their requests (no async scheduling)."""
        for name, tokens in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            state = self._states.get(name)
            if state is None or state.request.is_prefill_chunk:
                continue
            kept, length = state.request.spec_token_ids, state.length
            if len(kept) > length:
                state.request.spec_token_ids = kept = kept[:length]
            state.proposed = len(kept)
            self.report.proposed(state.proposed)
            # What the request's grammar refuses is not verified.
            self._wasted(state, len(kept), min(len(tokens), length) - len(kept))

    # -- its output arrives -----------------------------------------------------------------------

    def output_arrives(self, output: Any) -> None:
        """The output of a step is about to be processed."""
        while self._steps and self._steps[0].output is not output:
            self._close(self._steps.popleft())
        self._current = self._steps.popleft() if self._steps else None
        step, now = self._current, self._clock_s()
        if step is None:
            return
        if self.planner is not None and step.only_decodes and step.tokens:
            seconds = now - max(step.started_s, self._last_end_s)
            self.planner.times.observe(step.tokens, seconds, step.shape)
        self._last_end_s = now

    def verified(self, request_id: str, accepted: int, invalid: int) -> None:
        """``accepted`` of a request's drafted tokens were accepted, ``invalid`` never tried."""
        round_ = self._current.rounds.pop(request_id, None) if self._current else None
        if round_ is None:
            return
        state, drafted = round_
        index = state.request.num_output_tokens
        tried = max(0, drafted - invalid)
        accepted = min(accepted, tried)
        self._wasted(state, tried, drafted - tried)
        if not tried:
            return
        self.report.verified(tried, accepted, index)
        if state.acceptance is not None:
            state.acceptance.observe(tried, accepted)

    def output_processed(self) -> None:
        """The output of a step has been processed."""
        step, self._current = self._current, None
        if step is not None:
            self._close(step)

    # -- drafts that are never verified ------------------------------------------------------------

    def dropped(self, request_id: str) -> None:
        """The drafts that a request has ready are thrown away (it is preempted)."""
        state = self._states.get(request_id)
        if state is not None:
            self._wasted(state, 0, state.proposed)
            state.proposed = 0

    def ended(self, request_id: str) -> None:
        """A request has ended."""
        self.dropped(request_id)
        self._states.pop(request_id, None)

    def _close(self, step: _Step) -> None:
        for state, drafted in step.rounds.values():
            self._wasted(state, 0, drafted)
        step.rounds = {}

    def _forget_lost_steps(self) -> None:
        while len(self._steps) > _MOST_STEPS:
            self._close(self._steps.popleft())

    def _wasted(self, state: _Drafting, first: int, count: int) -> None:
        if count > 0:
            self.report.unverified(first, count, state.request.num_output_tokens)

    def _new_state(self, request: Any) -> _Drafting:
        acceptance = self.planner.new_request() if self.planner is not None else None
        state = _Drafting(request, acceptance, self._scheduler.num_spec_tokens)
        self._states[request.request_id] = state
        return state


@lru_cache(maxsize=8)
def extended(base: Any) -> Any:
    """``base`` (``Scheduler``, ``AsyncScheduler`` or a user's own) with the feature's methods.

    What the stock methods decide stays as it is but for the number of drafts. The class has
    ``base`` as its only base, so that an existing scheduler can become an instance of it.
    """
    if hasattr(base, "draft_control"):
        return base

    class MtpScheduler(base):  # type: ignore[misc]
        """``base`` with draft lengths and counters of drafts."""

        draft_control: DraftControl = None  # type: ignore[assignment]  # install() sets it

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            """As upstream; the step's time is measured from here."""
            self.draft_control.scheduling()
            return super().schedule(*args, **kwargs)

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            """As upstream, with draft lengths decided before and applied after."""
            self.draft_control.scheduled(scheduler_output)
            super()._update_after_schedule(scheduler_output)
            self.draft_control.advanced()

        def update_draft_token_ids(self, draft_token_ids: Any) -> None:
            """As upstream; then each request keeps as many drafts as it shall verify."""
            super().update_draft_token_ids(draft_token_ids)
            self.draft_control.drafted(draft_token_ids)

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            """As upstream; drafts that the output says nothing of count as not verified."""
            self.draft_control.output_arrives(scheduler_output)
            result = super().update_from_output(scheduler_output, *args, **kwargs)
            self.draft_control.output_processed()
            return result

        def make_spec_decoding_stats(
            self,
            spec_decoding_stats: Any,
            num_draft_tokens: int,
            num_accepted_tokens: int,
            num_invalid_spec_tokens: dict[str, int] | None,
            request_id: str,
        ) -> Any:
            """As upstream, which calls it for every request whose drafts were verified."""
            invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
            self.draft_control.verified(request_id, num_accepted_tokens, invalid)
            return super().make_spec_decoding_stats(
                spec_decoding_stats,
                num_draft_tokens=num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                num_invalid_spec_tokens=num_invalid_spec_tokens,
                request_id=request_id,
            )

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            """As upstream; the drafts that the request had ready are lost."""
            self.draft_control.dropped(request.request_id)
            super()._preempt_request(request, *args, **kwargs)

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            """As upstream; the request is forgotten."""
            self.draft_control.ended(request.request_id)
            return super()._free_request(request, *args, **kwargs)

    MtpScheduler.__name__ = MtpScheduler.__qualname__ = f"Mtp{base.__name__}"
    return MtpScheduler


def install(
    scheduler: Any,
    settings: MtpSettings,
    *,
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Let the feature decide and count the drafts of a scheduler.

    Args:
        scheduler: of any class derived from vLLM's ``Scheduler``; it becomes an instance of the
            extended class.
        settings: what the scheduler needs to know of the feature.
        clock_s: monotonic seconds.

    Raises:
        ValueError: the scheduler has requests, whose drafts would not be known.
    """
    if scheduler.requests:
        raise ValueError(f"{len(scheduler.requests)} requests are there; install on an idle engine")
    if not hasattr(scheduler, "draft_control"):
        scheduler.__class__ = extended(scheduler.__class__)
    scheduler.draft_control = DraftControl(scheduler, settings, clock_s)
