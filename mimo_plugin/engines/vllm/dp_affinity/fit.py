# SPDX-License-Identifier: Apache-2.0
"""Does the feature ``dp_affinity`` fit these engine settings?"""

from __future__ import annotations

from typing import Any

from mimo_plugin.engines.vllm import register
from mimo_plugin.errors import setting_error

_LEAVE_OUT = "leave dp_affinity out of --plugin mimo:…"


def unused(vllm_config: Any) -> bool:
    """There is one rank, so there is nothing to choose."""
    return bool(vllm_config.parallel_config.data_parallel_size <= 1)


def why_not(vllm_config: Any) -> str | None:
    """Reason, with its fix, why the feature can't run with this configuration; None if it can.

    Raises:
        ConfigError: ids given in the configuration are outside the vocabulary.
    """
    parallel = vllm_config.parallel_config
    if unused(vllm_config):
        return (
            f"--data-parallel-size is {parallel.data_parallel_size}, so there is one rank; "
            f"set it to 2 or more, or {_LEAVE_OUT}"
        )
    if parallel.data_parallel_external_lb:
        return (
            "the load balancer is an external one (--data-parallel-external-lb, "
            "--data-parallel-rank or --data-parallel-multi-port-external-lb), so each server has "
            f"one rank; let that balancer keep chats on their rank, and {_LEAVE_OUT}"
        )
    if parallel.data_parallel_hybrid_lb and parallel.data_parallel_size_local <= 1:
        return (
            f"--data-parallel-size-local is {parallel.data_parallel_size_local} under "
            f"--data-parallel-hybrid-lb, so this node has one rank; {_LEAVE_OUT}"
        )
    if parallel.data_parallel_rank_local is not None:
        return (
            "each rank is a process of the user's own (VLLM_DP_RANK), so nothing balances "
            f"requests; {_LEAVE_OUT}"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        return f"prefix caching is off, so no rank has anything to come back to; {_LEAVE_OUT}"
    if _rust_frontend():
        return (
            "VLLM_USE_RUST_FRONTEND is set, and that front end balances requests itself; unset "
            f"it, or {_LEAVE_OUT}"
        )
    _check_answer_token_ids(vllm_config)
    return None


def _rust_frontend() -> bool:
    from vllm import envs

    return bool(envs.VLLM_USE_RUST_FRONTEND)


def _check_answer_token_ids(vllm_config: Any) -> None:
    config = register.config_from(vllm_config)
    given = config.dp_affinity.answer_token_ids if config else None
    vocabulary = vllm_config.model_config.get_vocab_size()
    wrong = [i for i in given or () if not 0 <= i < vocabulary]
    if wrong:
        raise setting_error(
            "mimo.dp_affinity.answer_token_ids",
            wrong,
            f"token ids from 0 to {vocabulary - 1}",
            "null takes them from the tokenizer's chat template",
        )
