# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own that answers image prompts and says what the encoder did.

    python -m integration_tests.ec_shared_client MODEL '{"role": "ec_both", "name": "x", ...}'

The JSON object may hold ``role`` and ``name`` (use the node's shared embedding cache), ``section``
(settings of the plugin) and ``images`` (how many of them are asked for). The process prints
``READY``, waits for a line, answers, prints ``RESULT {json}`` and waits for another line, so that
the cache stays.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPT = "hello <|vision_start|><|image_pad|><|vision_end|> describe"
SIZES = ((300, 400), (200, 200), (650, 350), (220, 260))


def main(model: str, given: str) -> None:
    """Serve the prompts and report; see the module."""
    import numpy as np
    from PIL import Image
    from vllm import LLM, SamplingParams

    settings = json.loads(given)
    options: dict[str, Any] = {}
    if "role" in settings:
        options["ec_transfer_config"] = {
            "ec_connector": "MimoSharedECConnector",
            "ec_role": settings["role"],
            "ec_connector_extra_config": {"capacity_mib": 16, "name": settings["name"]},
        }
    if "section" in settings:
        options["additional_config"] = {"mimo": settings["section"]}
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        limit_mm_per_prompt={"image": 2, "video": 0, "audio": 0},
        disable_log_stats=False,
        **options,
    )
    tower = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    embed, encoded = tower.embed_multimodal, []

    def counted(**inputs: Any) -> Any:
        outputs = embed(**inputs)
        encoded.append(len(outputs))
        return outputs

    tower.embed_multimodal = counted
    chance = np.random.default_rng(0)
    images = [
        Image.fromarray(chance.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES
    ][: settings.get("images", len(SIZES))]
    asked = [{"prompt": PROMPT, "multi_modal_data": {"image": image}} for image in images]
    asked.append({"prompt": PROMPT * 2, "multi_modal_data": {"image": images[:2]}})
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    print("READY", flush=True)
    sys.stdin.readline()
    answers = [answer.outputs[0] for answer in llm.generate(asked, sampling, use_tqdm=False)]
    result = {
        "encoded": sum(encoded),
        "metrics": metrics(),
        "answers": [
            [
                [token, shown[token].logprob]
                for token, shown in zip(answer.token_ids, answer.logprobs or (), strict=True)
            ]
            for answer in answers
        ],
    }
    print("RESULT", json.dumps(result), flush=True)
    sys.stdin.readline()


def metrics() -> dict[str, float]:
    """What the engine exports of the cache: name and own labels to value."""
    import prometheus_client

    found = {}
    for metric in prometheus_client.REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith("mimo:encoder_cache_") and sample.value:
                own = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
                name = sample.name.removeprefix("mimo:encoder_cache_")
                if not name.endswith("_created"):
                    found["_".join((name, *own))] = sample.value
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
