# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own that answers image prompts and says what the encoder did.

    python -m integration_tests.ec_shared_client MODEL [NAME]

With NAME the engine uses the node's shared encoder cache under that name. It prints one line
``RESULT {json}`` and then waits for a line on its standard input, so that the cache stays.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPT = "hello <|vision_start|><|image_pad|><|vision_end|> describe"
SIZES = ((300, 400), (200, 200), (650, 350))


def main(model: str, name: str | None = None) -> None:
    """Serve the prompts and report; see the module."""
    import numpy as np
    from PIL import Image
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if name is not None:
        options["ec_transfer_config"] = {
            "ec_connector": "MimoSharedECConnector",
            "ec_role": "ec_both",
            "ec_connector_module_path": "mimo_plugin.engines.vllm.ec_shared",
            "ec_connector_extra_config": {"capacity_mib": 16, "name": name},
        }
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        limit_mm_per_prompt={"image": 2, "video": 0, "audio": 0},
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
    ]
    asked = [{"prompt": PROMPT, "multi_modal_data": {"image": image}} for image in images]
    asked.append({"prompt": PROMPT * 2, "multi_modal_data": {"image": images[:2]}})
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    answers = [answer.outputs[0] for answer in llm.generate(asked, sampling, use_tqdm=False)]
    result = {
        "encoded": sum(encoded),
        "answers": [
            [
                [token, shown[token].logprob]
                for token, shown in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
            for answer in answers
        ],
    }
    print("RESULT", json.dumps(result), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
