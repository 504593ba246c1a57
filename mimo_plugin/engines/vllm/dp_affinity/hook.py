# SPDX-License-Identifier: Apache-2.0
"""The rule put into vLLM's internal balancer, one instance in each API process.

``DPLBAsyncMPClient`` sends a request where it says (``data_parallel_rank``) and else to the rank
with the lowest score. So the hook says: it writes the chosen rank into the request while the stock
method runs, which then keeps its own books, and takes it out again. The request that travels to
the engine is the stock one.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from mimo_plugin.config_dp_affinity import DpAffinityConfig
from mimo_plugin.core.chat_key import Keys, Mark, named_key, seed_of
from mimo_plugin.core.dp_affinity import Choice, DpAffinity, rank_load
from mimo_plugin.engines.chat_template import answer_opening_from
from mimo_plugin.engines.vllm import register
from mimo_plugin.engines.vllm.dp_affinity.report import REPORT

logger = logging.getLogger(register.LOGGER_NAME)

_MARK = "mimo_plugin_wrapper"
_BALANCER = "_mimo_dp_affinity"


class Balancer:
    """Chooses for one client of the engines.

    Args:
        config: the feature's section.
        opening: tokens that open an answer.
        alone: the client is the only one of its engines.
    """

    def __init__(
        self,
        config: DpAffinityConfig,
        opening: tuple[int, ...],
        alone: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = Keys(opening, config.max_sessions)
        self._rule = DpAffinity(
            alone=alone,
            slack_requests=config.slack_requests,
            slack_share=config.slack_share,
            spread=config.spread,
            session_ttl_s=config.session_ttl_s,
            max_sessions=config.max_sessions,
        )
        self._clock = clock

    def choose(self, client: Any, request: Any) -> Choice | None:
        """The place of the request's rank among the client's engines; None leaves it to vLLM.

        vLLM decides where a rank is given, where the request goes on with one in flight, for
        pooling, and where neither tokens nor a name tell the chat.
        """
        if (
            request.data_parallel_rank is not None
            or request.pooling_params is not None
            or request.request_id in client.reqs_in_flight
        ):
            return None
        lora = request.lora_request
        seed = seed_of(
            lora.lora_name if lora else None, lora.lora_path if lora else None, request.cache_salt
        )
        parted: list[int] = []
        if request.session_id:
            key = named_key(request.session_id, seed)
        elif request.prompt_token_ids and request.prompt_embeds is None:
            key, parted = self._keys.find(request.prompt_token_ids, _marks(request), seed)
        else:
            return None
        now_s = self._clock()
        choice = self._rule.choose(key, _loads(client), now_s)
        self._rule.part(parted, key, now_s)
        return choice


def _marks(request: Any) -> list[Mark]:
    """Images and other items of the request, in order of their places."""
    return [
        (feature.mm_position.offset, str(feature.identifier).encode("utf-8", "surrogatepass"))
        for feature in request.mm_features or ()
    ]


def _loads(client: Any) -> list[float]:
    """Load of each rank. While ranks come or go there are counts or engines for some only."""
    return [
        rank_load(waiting, running, kv_usage, client.engine_inflight[engine])
        for (waiting, running, kv_usage), engine in zip(
            client.lb_engines, client.core_engines, strict=False
        )
    ]


def install() -> None:
    """Wrap the internal balancer; a second call changes nothing, and so do engines without us."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    stock_init = DPLBAsyncMPClient.__init__
    stock_choose = DPLBAsyncMPClient.get_core_engine_for_request
    if getattr(stock_choose, _MARK, False):
        return

    @functools.wraps(stock_init)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, vllm_config, *args, **kwargs)
        config = register.config_from(vllm_config)
        if config is not None and "dp_affinity" in config.features:
            given = config.dp_affinity.answer_token_ids
            opening = answer_opening(vllm_config) if given is None else given
            setattr(self, _BALANCER, Balancer(config.dp_affinity, opening, self.client_count == 1))

    @functools.wraps(stock_choose)
    def get_core_engine_for_request(self: Any, request: Any) -> Any:
        balancer = getattr(self, _BALANCER, None)
        if balancer is None:
            return stock_choose(self, request)
        choice = balancer.choose(self, request)
        if choice is None:
            engine = stock_choose(self, request)
        else:
            request.data_parallel_rank = choice.rank
            try:
                engine = stock_choose(self, request)
            finally:
                request.data_parallel_rank = None
        rank = self.engine_ranks_managed[self.core_engines.index(engine)]
        REPORT.sent(rank, choice.outcome if choice else "other")
        return engine

    setattr(get_core_engine_for_request, _MARK, True)
    DPLBAsyncMPClient.__init__ = __init__
    DPLBAsyncMPClient.get_core_engine_for_request = get_core_engine_for_request


def answer_opening(vllm_config: Any) -> tuple[int, ...]:
    """Tokens that open an answer in the model's chat template; () if unknown."""
    model_config = vllm_config.model_config
    if model_config.skip_tokenizer_init:
        return ()
    try:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(model_config)
    except Exception as error:  # a tokenizer that can't be read must not stop the engine
        logger.warning("mimo dp_affinity: the tokenizer can't be read: %s", error)
        return ()
    opening = answer_opening_from(tokenizer, logger)
    if not opening:
        logger.info("mimo dp_affinity: no mark of answers in the chat template")
    return opening
