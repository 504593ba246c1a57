# SPDX-License-Identifier: Apache-2.0
"""What the feature writes into the engine's arguments and configuration, and into a worker.

All of it travels with one engine's configuration; other engines in the process stay as they are.
"""

from __future__ import annotations

from typing import Any

from mimo_plugin.config import MimoConfig
from mimo_plugin.engines.vllm.mtp import fit, transfer
from mimo_plugin.engines.vllm.mtp.checkpoint import available_layers
from mimo_plugin.engines.vllm.mtp.names import DRAFT_LAYERS, REPLACES
from mimo_plugin.errors import FeatureUnavailable, setting_error


def complete_arguments(engine_args: Any, config: MimoConfig) -> None:
    """Fill in what the user left open in ``speculative_config``, before vLLM reads it.

    Only where the feature was named: speculation is switched on when no method was chosen, and the
    number of draft tokens is that of the checkpoint's MTP layers when none was given.

    Raises:
        FeatureUnavailable: the checkpoint's layers can't be counted or there are none.
        ConfigError: the section is not an object.
    """
    if "mtp" not in config.named:
        return
    given = engine_args.speculative_config
    if given is None:
        given = {"method": "mtp"}
    if not isinstance(given, dict):
        raise setting_error(
            "--speculative-config", given, "a JSON object", "drop it, the plugin fills it in"
        )
    if given.get("method") != "mtp" or given.get("num_speculative_tokens") is not None:
        return
    if given.get("model") is not None:
        return  # vLLM reads the number from that model's configuration, or asks for it
    # The draft's weights are read at its own revision, whatever the target's is.
    layers = available_layers(
        config.mtp, engine_args.model, given.get("revision"), str(engine_args.load_format)
    )
    engine_args.speculative_config = {**given, "num_speculative_tokens": layers}


def configure(vllm_config: Any) -> None:
    """Give the draft its layers and, for more than one draft token, its class.

    vLLM pinned the number of layers to 1. ``num_nextn_predict_layers`` is what makes it take its
    multi-module speculator and what every look-ahead of the scheduler derives from. Of the names
    only the one is changed that workers build the model from: what vLLM has worked out about its
    own class holds for ours as well.
    """
    spec = vllm_config.speculative_config
    if spec.num_speculative_tokens == 1:
        return  # one layer, one draft: vLLM's own classes do just that
    draft = spec.draft_model_config
    layers = fit.draft_layers(vllm_config)
    names = [REPLACES.get(name, name) for name in draft.hf_config.architectures]
    draft.hf_config.update(
        {"num_nextn_predict_layers": layers, "n_predict": layers, "architectures": names}
    )


def prepare_worker(vllm_config: Any) -> None:
    """Make the draft class known in this process, and the layers to its KV connector."""
    from mimo_plugin.engines.vllm.mtp.model import register

    register()
    transfer.prepare_worker(vllm_config)


def prepare_scheduler(kv_cache_config: Any) -> None:
    """Mark every KV cache group that holds an MTP layer as one of a draft model.

    vLLM marks the group of the last layer alone, but the layers may be spread over several groups.
    Where a mark is missing a connector would take the last rows of those groups for final.
    """
    for group in kv_cache_config.kv_cache_groups:
        if any(DRAFT_LAYERS in name for name in group.layer_names):
            group.is_eagle_group = True


def install_speculator(worker: Any) -> None:
    """Give a worker, before it loads the weights, the feature's speculator.

    The stage that drafts (the last of pipeline parallelism) has vLLM's speculator by now; the
    others have none.
    """
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import (
        MultiModuleMTPSpeculator,
    )

    from mimo_plugin.engines.vllm.mtp.speculator import MimoMTPSpeculator

    runner = worker.model_runner
    found = getattr(runner, "speculator", None)
    if found is None or worker.vllm_config.speculative_config.num_speculative_tokens == 1:
        return
    if type(found) is not MultiModuleMTPSpeculator:
        raise FeatureUnavailable(
            f"feature 'mtp': found the speculator {type(found).__name__}, needed: "
            "MultiModuleMTPSpeculator; fix: leave out the plugin that replaces it"
        )
    runner.speculator = MimoMTPSpeculator(worker.vllm_config, runner.device)
