# SPDX-License-Identifier: Apache-2.0
"""Serve one seeded prompt in four chunks, then from the prefix cache in one; print as JSON.

Argument: directory of a tiny checkpoint (``tools.tiny_mimo``). Answers ``error``, or ``cold`` and
``cached`` (output tokens), ``hit_tokens`` of the second run and ``other`` (another seed's tokens).
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def main() -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=64,
        max_num_seqs=2,
        block_size=32,
        enforce_eager=True,
        # A hit keeps the prompt's last block, so that the cached run has one chunk.
        enable_prefix_caching=True,
    )
    prompt = {"prompt_token_ids": [20 + 7 * i % 900 for i in range(230)]}

    def run(seed: int) -> tuple[list[int], int]:
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)
        (answer,) = engine.generate([prompt], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids), answer.num_cached_tokens

    try:
        cold, cached, other = run(3), run(3), run(4)
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}))
        return
    result = {"cold": cold[0], "cached": cached[0], "hit_tokens": cached[1], "other": other[0]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
