# SPDX-License-Identifier: Apache-2.0
"""The feature ``vision`` on a patched engine, beside that engine without it; prints JSON.

Argument: directory of a tiny checkpoint (``tools.tiny_omni``). For each request: whether prompt and
patch rows are the same to the bit. ``outer``: the prompt of a video with ``outer_tokens: stock``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY

from mimo_plugin.engines.vllm.register import activate
from tests.vision.conftest import movie
from tests.vision.test_processor import IMAGE, VIDEO, decoded, images, rows_of, run

TIMES = {"frames_indices": [0, 6000, 12000, 12030], "fps": 30.0}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "images": (IMAGE * 2, {"image": images((300, 400), (37, 640))}, {}),
    "video": (f"a {VIDEO} b", {"video": [(movie(4, 96, 130), TIMES)]}, {}),
    "kwargs": (IMAGE, {"image": images((512, 512))}, {"max_pixels": 128 * 128}),
}
ROWS = {"image": "pixel_values", "video": "pixel_values_videos"}


def processor(model: str, settings: dict[str, Any] | None) -> Any:
    """Of an engine with the feature, or without where ``settings`` is None."""
    mimo = {} if settings is None else {"mimo": {"vision": settings}}
    config = EngineArgs(
        model=model, dtype="float32", max_model_len=4096, additional_config=mimo
    ).create_engine_config()
    activate(config, environ={})
    return MULTIMODAL_REGISTRY.create_processor(config.model_config)


def main() -> None:
    theirs = processor(sys.argv[1], None)
    ours = processor(sys.argv[1], {"backend": "reference"})
    found: dict[str, Any] = {}
    for name, (text, data, kwargs) in CASES.items():
        (kind,) = data
        one, other = (run(either, text, data, **kwargs) for either in (ours, theirs))
        rows = [item.get_data()[ROWS[kind]] for item in other["mm_kwargs"][kind]]
        found[name] = {
            "prompt": one["prompt_token_ids"] == other["prompt_token_ids"],
            "rows": torch.equal(rows_of(ours, one, kind), torch.cat(rows)),
        }
    bare = processor(sys.argv[1], {"outer_tokens": "stock"})
    text, data, _ = CASES["video"]
    found["outer"] = decoded(bare, run(bare, text, data))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
