# SPDX-License-Identifier: Apache-2.0
"""Prepare images and videos with MiMo-V2 Omni's processor; print what comes out as JSON.

Arguments: directory of a tiny checkpoint (``tools.tiny_omni``), then parts: ``pixels``, ``times``,
``prompt``, ``kwargs``. They are the functions of the same name, and the keys of the answer. Nothing
is served: no weights are loaded.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}

import numpy as np
import torch
from PIL import Image
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.processing import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
SIDE = 128
"""Pixels along a side that the checkpoint's limits leave as they are."""
COLOR = (10, 100, 200)
MEAN_STD = ("image_mean", "image_std")


def processor_of(model: Path, dtype: str = "float32", **options: Any) -> tuple[Any, Any]:
    """The multimodal processor of an engine, and the configuration of its model."""
    config = EngineArgs(
        model=str(model),
        dtype=dtype,
        max_model_len=8192,
        limit_mm_per_prompt={"image": 2, "video": 2, "audio": 0},
        **options,
    ).create_model_config()
    return MULTIMODAL_REGISTRY.create_processor(config), config


def prepare(
    processor: Any, text: str, data: Mapping[str, Any], cache: Any = None, **kwargs: Any
) -> Any:
    """The engine's input for a prompt with media."""
    inputs = ProcessorInputs(
        prompt=processor.info.get_tokenizer().encode(text),
        mm_data_items=processor.info.parse_mm_data(data),
        hf_processor_mm_kwargs=kwargs,
        cache=cache,
    )
    return processor.apply(inputs, TimingContext(enabled=False))


def attempt(function: Callable[[], Any]) -> Any:
    """The result, or the first line of the error and of what caused it."""
    try:
        return function()
    except (ArithmeticError, TypeError, ValueError) as error:
        causes = [error, error.__cause__]
        return {"error": " / ".join(str(cause).splitlines()[0] for cause in causes if cause)}


def frames(count: int) -> Any:
    """``count`` uint8 frames, THWC, that differ from each other."""
    shape = (count, SIDE, SIDE, 3)
    return np.random.default_rng(count).integers(0, 256, shape, dtype=np.uint8)


def metadata(fps: float, indices: list[int], **more: Any) -> dict[str, Any]:
    """What the engine's video loaders tell about the frames they chose."""
    total = max(indices) + 1
    return {
        "total_num_frames": total,
        "fps": fps,
        "duration": total / fps if fps > 0 else 0.0,
        "video_backend": "opencv",
        "frames_indices": indices,
        "do_sample_frames": False,
        **more,
    }


def with_preprocessor(
    model: Path, changed: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> Path:
    """Make the checkpoint ``changed``: ``model`` with another ``preprocessor_config.json``.

    ``change`` gets the content of the file and returns the new one; None: there is none.
    """
    changed.mkdir()
    for file in model.iterdir():
        (changed / file.name).symlink_to(file.resolve())
    path = changed / "preprocessor_config.json"
    content = change(json.loads(path.read_text()))
    path.unlink()
    if content is not None:
        path.write_text(json.dumps(content))
    return changed


def pixels(model: Path) -> Any:
    """Per checkpoint: the red, green and blue that the model sees of an image and of a video."""

    def colors(rows: Any) -> list[float]:
        # Columns of a patch row: channel, frame, line, column.
        channels = rows.view(rows.shape[0], 3, -1)
        assert (channels == channels[:1, :, :1]).all()
        return [float(value) for value in channels[0, :, 0]]

    changes: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        "clip": lambda content: content,
        "none": lambda content: None,
        "silent": lambda content: {k: v for k, v in content.items() if k not in MEAN_STD},
        "scalar": lambda content: content | {"image_mean": 0.5, "image_std": 0.25},
        "rescaled": lambda content: (
            content | {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [0.5] * 3}
        ),
        "raw": lambda content: (
            content | {"do_rescale": False, "image_mean": [128] * 3, "image_std": [64] * 3}
        ),
    }
    found = {}
    still = Image.new("RGB", (SIDE, SIDE), COLOR)
    clip = np.broadcast_to(np.array(COLOR, dtype=np.uint8), (2, SIDE, SIDE, 3)).copy()
    with tempfile.TemporaryDirectory() as scratch:
        for name, change in changes.items():
            processor, _ = processor_of(with_preprocessor(model, Path(scratch, name), change))
            out = prepare(processor, IMAGE + VIDEO, {"image": [still], "video": [clip]})
            image, video = (out["mm_kwargs"][kind][0] for kind in ("image", "video"))
            found[name] = {
                "image": colors(image["pixel_values"].data),
                "video": colors(video["pixel_values_videos"].data),
            }
    return found


def times(model: Path) -> Any:
    """Per video: the times in the engine's prompt, and in that of the reference processor."""

    def compared(processor: Any, video: Any, seconds: list[float]) -> dict[str, str]:
        ids = prepare(processor, VIDEO, {"video": [video]})["prompt_token_ids"]
        pair = torch.zeros(len(seconds), 3, SIDE, SIDE), torch.tensor(seconds)
        reference = processor.info.get_hf_processor()(text=VIDEO, videos=[pair])["input_ids"]
        tokenizer = processor.info.get_tokenizer()
        return {
            "engine": labels(tokenizer, ids),
            "reference": labels(tokenizer, reference[0].tolist()),
        }

    uneven = [0.0, 1.5, 7.0, 401.0, 401.5, 3599.9, 3600.0, 7322.0]
    four = [0, 5999, 12000, 17999]
    explicit = torch.from_numpy(frames(4)).permute(0, 3, 1, 2)
    known = metadata(30.0, four)
    videos: dict[str, tuple[Any, list[float]]] = {
        "sampled": ((frames(4), known), [i / 30 for i in four]),
        "with bytes": (MediaWithBytes((frames(4), known), b"video"), [i / 30 for i in four]),
        "uneven": ((frames(8), metadata(30.0, list(range(8)), timestamps=uneven)), uneven),
        "explicit": ((explicit, torch.tensor([3.0, 4.0, 61.0, 62.0])), [3.0, 4.0, 61.0, 62.0]),
        "odd": ((frames(3), metadata(2.0, [100, 110, 180])), [50.0, 55.0, 90.0, 90.0]),
        "one": ((frames(1), metadata(25.0, [2500])), [100.0, 100.0]),
        "repeated": ((frames(4), metadata(1.0, [9, 9, 9, 9])), [9.0] * 4),
        "without": (frames(4), [0.0, 1.0, 2.0, 3.0]),
        "no fps": ((frames(4), metadata(0.0, [0, 10, 20, 30])), [0.0, 1.0, 2.0, 3.0]),
    }
    found: dict[str, Any] = {}
    processors = {dtype: processor_of(model, dtype) for dtype in ("float32", "bfloat16")}
    for name, (video, seconds) in videos.items():
        for dtype, (processor, _) in processors.items():
            found[f"{name}/{dtype}"] = attempt(
                lambda p=processor, v=video, s=seconds: compared(p, v, s)
            )

    processor, config = processors["float32"]
    tokenizer = processor.info.get_tokenizer()
    wrong = (frames(4), metadata(30.0, [0, 1, 2]))
    found["wrong length"] = attempt(
        lambda: len(prepare(processor, VIDEO, {"video": [wrong]})["prompt_token_ids"])
    )
    # The same frames at other times, with the cache that an engine has by default.
    cache = MultiModalProcessorOnlyCache(config)
    found["cached"] = []
    for indices in (four, [0, 300, 600, 900], four):
        data = {"video": [(frames(4), metadata(30.0, indices))]}
        out = prepare(processor, VIDEO, data, cache)
        found["cached"].append(
            [out["mm_hashes"]["video"][0], labels(tokenizer, out["prompt_token_ids"])]
        )
    # Two videos of different lengths in one prompt.
    both = {"video": [(frames(2), metadata(1.0, [5, 6])), (frames(6), metadata(0.1, [*range(6)]))]}
    out = prepare(processor, VIDEO * 2, both)
    found["two"] = labels(tokenizer, out["prompt_token_ids"])
    return found


def labels(tokenizer: Any, ids: list[int]) -> str:
    """The plain text of a prompt, a blank for each run of special tokens."""
    special = set(tokenizer.all_special_ids)
    runs = [""]
    for token in ids:
        if token not in special:
            runs[-1] += tokenizer.decode([token])
        elif runs[-1]:
            runs.append("")
    return " ".join(run for run in runs if run)


def prompt(model: Path) -> Any:
    """Per prompt: its ids of the engine and of the reference, and the engine's placeholders."""
    processor, _ = processor_of(model)
    tokenizer = processor.info.get_tokenizer()
    reference = processor.info.get_hf_processor()
    pictures = [Image.new("RGB", (96, 160)), Image.new("RGB", (200, 64))]
    clips = [frames(count) for count in (4, 3)]
    tuples = [
        (torch.from_numpy(clip).permute(0, 3, 1, 2), torch.arange(len(clip), dtype=torch.float32))
        for clip in clips
    ]
    found = {}
    for name, text in {
        "alone": VIDEO,
        "in text": f"<|im_start|>user\nlook: {VIDEO} what?<|im_end|>\n",
        "two": f"{VIDEO}{VIDEO}",
        "mixed": f"a {IMAGE}b {VIDEO}c {IMAGE}{VIDEO}d",
        "images": f"{IMAGE} and {IMAGE}",
        "bare": f"a {VIDEO.replace('<|vision_start|>', '').replace('<|vision_end|>', '')} b",
    }.items():
        count = {"image": text.count("<|image_pad|>"), "video": text.count("<|video_pad|>")}
        data = {"image": pictures[: count["image"]], "video": clips[: count["video"]]}
        out = prepare(processor, text, {kind: items for kind, items in data.items() if items})
        ids = out["prompt_token_ids"]
        places = [
            {
                "kind": kind,
                "embeds": place.get_num_embeds(),
                "ends": [tokenizer.decode([ids[i]]) for i in (start, start + place.length - 1)],
            }
            for kind, found_places in out["mm_placeholders"].items()
            for place in found_places
            for start in (place.offset,)
        ]
        expected = reference(
            text=text.replace("a <|video_pad|> b", f"a {VIDEO} b"),
            images=pictures[: count["image"]] or None,
            videos=tuples[: count["video"]] or None,
        )
        found[name] = {
            "engine": ids,
            "reference": expected["input_ids"][0].tolist(),
            "text": tokenizer.decode(ids),
            "placeholders": places,
        }
    return found


def kwargs(model: Path) -> Any:
    """Per setting: merged tokens of an image and of a frame pair, and the tokens planned for."""
    picture, clip = Image.new("RGB", (512, 512)), np.zeros((2, 256, 256, 3), dtype=np.uint8)
    data = {"image": [picture], "video": [clip]}

    def sizes(processor: Any, **options: Any) -> Any:
        out = prepare(processor, IMAGE + VIDEO, data, **options)
        grids = [
            out["mm_kwargs"][kind][0][f"{kind}_grid_thw"].data.prod().item() // 4
            for kind in ("image", "video")
        ]
        planned = processor.info.get_num_image_tokens(
            image_width=512,
            image_height=512,
            image_processor=processor.info.get_image_processor(**options),
            mm_kwargs=options,
        )
        return {"image": grids[0], "video": grids[1], "planned": planned}

    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "max": {"max_pixels": 128 * 128},
        "min": {"min_pixels": 1024 * 1024, "max_pixels": 1024 * 1024},
        "size": {"size": {"shortest_edge": 8192, "longest_edge": 128 * 128}},
        "max before size": {"max_pixels": 96 * 96, "size": {"longest_edge": 128 * 128}},
        "image": {"images_kwargs": {"max_pixels": 128 * 128}},
        "video": {"max_pixels": 128 * 128, "videos_kwargs": {"max_pixels": 96 * 96}},
        "crossed": {"min_pixels": 32768, "max_pixels": 16384},
        "tiny": {"min_pixels": 1, "max_pixels": 1023},
        "negative": {"min_pixels": -1},
        "word": {"max_pixels": "many"},
    }
    processor, _ = processor_of(model)
    found: dict[str, Any] = {
        name: attempt(lambda options=options: sizes(processor, **options))
        for name, options in settings.items()
    }
    started, _ = processor_of(model, mm_processor_kwargs={"max_pixels": 128 * 128, "device": "cpu"})
    found["startup"] = sizes(started)
    found["startup, request"] = sizes(started, max_pixels=96 * 96)
    found["most"] = [p.info.get_max_image_tokens() for p in (processor, started)]
    found["device"] = [
        str(p.info.get_hf_processor(**request).mimo_processor.device)
        for p in (processor, started)
        for request in ({}, {"device": "meta"})
    ]
    return found


PARTS: dict[str, Callable[[Path], Any]] = {
    "pixels": pixels,
    "times": times,
    "prompt": prompt,
    "kwargs": kwargs,
}


def main() -> None:
    model = Path(sys.argv[1])
    print(json.dumps({part: PARTS[part](model) for part in sys.argv[2:]}))


if __name__ == "__main__":
    main()
