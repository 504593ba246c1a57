# SPDX-License-Identifier: Apache-2.0
"""Switching the schedule policy on in the scheduler's process."""

from __future__ import annotations

import logging
from typing import Any

from mimo_plugin.config import MimoConfig
from mimo_plugin.core.cost import PrefillCost, parity_tokens_or_default
from mimo_plugin.engines.sglang import register

logger = logging.getLogger(register.LOGGER_NAME)


def install_policy(server_args: Any, config: MimoConfig) -> None:
    """Let the scheduler that is about to be built find the policy.

    Args:
        server_args: the engine's record.
        config: the plugin's configuration.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of

    from mimo_plugin.engines.sglang.sched.policy import install

    text_config = model_config_of(server_args).hf_text_config.to_dict()
    parity_tokens, derived = parity_tokens_or_default(text_config)
    if not derived:
        logger.info(
            "mimo scheduler: the model's config.json does not tell how prefill cost grows with "
            "context; taking %d tokens",
            parity_tokens,
        )
    install(config, PrefillCost(parity_tokens))
