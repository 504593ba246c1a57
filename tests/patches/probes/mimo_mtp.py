# SPDX-License-Identifier: Apache-2.0
"""Build MiMo-V2's draft model as an engine would; print what it consists of as JSON.

Arguments: directory of a tiny checkpoint (``tools.tiny_mimo``), then cases, each
``RUNNER:STEPS[:LAYERS]``: ``v1`` or ``v2``, number of speculative tokens, and the number of MTP
layers that ``config.json`` tells (published ones don't). Answers per case, either ``error`` or

- ``layers``: MTP layers built;
- ``loaded``: whether each holds the checkpoint's own weights of that layer;
- ``layers_of_step``: the layers that a step runs, the steps counted from 0;
- ``next``: what a step hands to the next one: the hidden states it got (``input``), its
  ``output`` (also by returning nothing else), or ``other``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
from tools.model_runner_v2 import enable

TOKENS = 5
SINKS = "attention_sink_bias"
"""A weight that differs between layers and stays as it is in the checkpoint."""


def checkpoint(model: Path, layers: int | None) -> Path:
    """``model``, or the same with the number of layers in its config."""
    if layers is None:
        return model
    told = model.with_name(f"{model.name}-{layers}")
    if told.is_dir():
        return told
    told.mkdir()
    for file in model.iterdir():
        (told / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    (told / "config.json").unlink()
    (told / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": layers}))
    return told


def engine_config(model: Path, runner: str, steps: int) -> Any:
    """The configuration of an engine with speculation."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    assert envs.VLLM_USE_V2_MODEL_RUNNER is (runner == "v2")
    return EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": steps},
    ).create_engine_config()


def start(config: Any, group: Path) -> None:
    """Set up what the CPU worker sets up before it loads a model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{group}", 0, "gloo")
        initialize_model_parallel(1, 1)


def describe(config: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Load the draft model and run each step once, as a profile run does."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model

    spec = config.speculative_config
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config, model_config=spec.draft_model_config)
    layers = list(model.model.mtp.layers.values())
    ran: list[int] = []
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda module, inputs, output, i=i: ran.append(i))
    tokens, positions = torch.arange(20, 20 + TOKENS), torch.arange(TOKENS)
    hidden = torch.randn(TOKENS, model.config.hidden_size)
    layers_of_step, handed = [], set()
    for step in range(spec.num_speculative_tokens):
        ran.clear()
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=TOKENS):
            result = model(tokens, positions, hidden, spec_step_idx=step)
        layers_of_step.append(list(ran))
        output, following = result if isinstance(result, tuple) else (result, result)
        kinds = {"input": hidden, "output": output}
        handed.add(next((name for name, value in kinds.items() if value is following), "other"))
    sinks = [weights[f"model.mtp.layers.{i}.self_attn.{SINKS}"] for i in range(len(layers))]
    return {
        "layers": len(layers),
        "loaded": [
            torch.equal(getattr(layer.self_attn, SINKS), sink)
            for layer, sink in zip(layers, sinks, strict=True)
        ],
        "layers_of_step": layers_of_step,
        "next": "/".join(sorted(handed)),
    }


def main() -> None:
    enable()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    from safetensors.torch import load_file

    model = Path(sys.argv[1])
    weights = load_file(model / "model.safetensors")
    results: dict[str, Any] = {}
    started = False
    for case in sys.argv[2:]:
        runner, steps, *layers = case.split(":")
        try:
            told = checkpoint(model, int(layers[0]) if layers else None)
            config = engine_config(told, runner, int(steps))
        except ValueError as error:
            results[case] = {"error": str(error)}
            continue
        if not started:
            start(config, model.with_name(f"{model.name}-group"))
            started = True
        results[case] = describe(config, weights)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
