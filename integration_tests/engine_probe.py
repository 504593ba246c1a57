# SPDX-License-Identifier: Apache-2.0
"""Run one engine in this process and print, as JSON, what it is made of and what it answers.

Usage: ``python engine_probe.py MODEL ADDITIONAL_CONFIG_JSON``; the last line is the result.
"""

import inspect
import json
import os
import random
import sys
import types

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

OURS = "mimo_plugin"


def wrapped():
    """Every function and class of the plugin that stands in a module or class of vLLM."""
    found = set()

    def is_ours(value):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, types.FunctionType):
            return f"/{OURS}/" in value.__code__.co_filename
        return isinstance(value, type) and value.__module__.split(".")[0] == OURS

    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.split(".")[0] != "vllm":
            continue
        for attribute, value in list(vars(module).items()):
            if is_ours(value):
                found.add(f"{name}.{attribute}")
            if isinstance(value, type) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    if is_ours(inner):
                        found.add(f"{name}.{value.__qualname__}.{member}")
    return sorted(found)


def foreign_classes(root):
    """Classes of the plugin anywhere in the engine's objects, to a depth that covers the core."""
    seen, found, level = set(), set(), [root]
    for _ in range(6):
        below = []
        for thing in level:
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            for base in type(thing).__mro__:
                if base.__module__.split(".")[0] == OURS:
                    found.add(f"{base.__module__}.{base.__qualname__}")
            children = []
            if isinstance(thing, dict):
                children = list(thing.values())
            elif isinstance(thing, (list, tuple)):
                children = list(thing)[:64]
            elif hasattr(thing, "__dict__") and not inspect.ismodule(thing):
                children = list(vars(thing).values())
            below += [child for child in children if not isinstance(child, (str, int, float))]
        level = below
    return sorted(found)


def main():
    model, additional_config = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=16,
        max_num_batched_tokens=512,
        disable_log_stats=False,
        additional_config=additional_config,
    )
    rng = random.Random(5)
    shared = [rng.randrange(16, 200) for _ in range(400)]
    outputs = []
    for tail in range(3):
        prompt = shared + [rng.randrange(16, 200) for _ in range(40 + tail)]
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        outputs.append([list(answer.outputs[0].token_ids), answer.num_cached_tokens])
    config = llm.llm_engine.vllm_config
    from prometheus_client import REGISTRY

    result = {
        "outputs": outputs,
        "wrapped": wrapped(),
        "classes": foreign_classes(llm.llm_engine),
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == OURS),
        "additional_config": config.additional_config,
        "config": config.compute_hash(),
        "scheduler_cls": config.scheduler_config.scheduler_cls,
        "worker_cls": config.parallel_config.worker_cls,
        "stat_loggers": [
            type(each).__name__ for each in llm.llm_engine.logger_manager.stat_loggers
        ],
        "metrics": {
            sample.name: sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith("mimo:")
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
