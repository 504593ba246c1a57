# SPDX-License-Identifier: Apache-2.0
"""The trained tiny MiMo checkpoint, whose MTP layers predict real text.

    python -m tools.tiny_trained out/tiny-trained

Trains on the Python standard library's sources in at most ten CPU minutes on one thread. The number
of steps is fixed, not the time, so one machine with one Python and one torch makes the same weights
again; another machine's arithmetic makes weights that differ a little. The result is committed in
``tools/tiny_trained`` (:data:`CHECKPOINT`) together with its recipe, ``tiny_trained.json``.

The checkpoint loads as :mod:`tools.tiny_mimo`'s do: architecture ``MiMoV2FlashForCausalLM``, load
format ``auto``, the same special tokens and chat template. Weights are stored in bfloat16. Give an
engine ``--dtype float32`` where its numbers are compared with :mod:`tools.mimo_torch`. The model
has seen Python code and no chats: it goes on with code whatever it is asked, and does not end a
message by itself.

:func:`held_out_prompts` takes prompts from source files that no training step has seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import tiny_trained_data
from tools.tiny_mimo import write_configs, write_json

CHECKPOINT = Path(__file__).parent / "tiny_trained"
"""The committed checkpoint."""

OUT = Path("out/tiny-trained")
"""Where a new one goes unless told otherwise."""

RECIPE = "tiny_trained.json"
PROMPT_TOKENS = 320
PROMPTS = 150
OUTPUTS = 16
DRAFTS = 3


def held_out_prompts(
    count: int, tokens: int = PROMPT_TOKENS, checkpoint: Path = CHECKPOINT
) -> list[list[int]]:
    """``count`` prompts of exactly ``tokens`` tokens each, cut from the held-out source files.

    Prompts don't overlap. They are the same for one Python, one checkpoint and one pair of numbers,
    and spread evenly over the files. Raises RuntimeError when this Python has no library sources,
    ValueError when they are too few for the request.
    """
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    windows: list[list[int]] = []
    for text in tiny_trained_data.split_texts(held_out=True):
        ids = encoder.encode(text).ids
        windows += [ids[i : i + tokens] for i in range(0, len(ids) - tokens + 1, tokens)]
    if count > len(windows):
        raise ValueError(
            f"{count} prompts of {tokens} tokens asked for; the held-out sources of this Python "
            f"have {len(windows)}"
        )
    return [windows[i * len(windows) // count] for i in range(count)]


def held_out_texts(
    count: int, tokens: int = PROMPT_TOKENS, checkpoint: Path = CHECKPOINT
) -> list[str]:
    """:func:`held_out_prompts` as text. Encoding a text again may give a few tokens less."""
    from tokenizers import Tokenizer

    decoder = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    prompts = held_out_prompts(count, tokens, checkpoint)
    return [decoder.decode(ids, skip_special_tokens=False) for ids in prompts]


def weights_sha256(checkpoint: Path) -> str:
    """SHA-256 of the checkpoint's weight file."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


def measure(
    checkpoint: Path,
    prompts: int = PROMPTS,
    outputs: int = OUTPUTS,
    tokens: int = PROMPT_TOKENS,
) -> dict[str, Any]:
    """Acceptance on held-out prompts, greedy, as the plain-torch reference decodes."""
    from tools import mimo_torch, mimo_torch_drafts

    model = mimo_torch.load(checkpoint)
    asked = held_out_prompts(prompts, tokens, checkpoint)
    known = [mimo_torch.greedy(model, prompt, outputs + DRAFTS) for prompt in asked]
    result: dict[str, Any] = {"prompts": prompts, "prompt_tokens": tokens, "outputs": outputs}
    for mode in mimo_torch_drafts.MODES:
        rounds = [
            mimo_torch_drafts.speculate(model, prompt, outputs, DRAFTS, mode, continuation)
            for prompt, continuation in zip(asked, known, strict=True)
        ]
        found = mimo_torch_drafts.acceptance(rounds, DRAFTS)
        result[mode] = {
            "conditional": [round(value, 4) for value in found.conditional],
            "length_tokens": round(found.length_tokens, 4),
        }
    return result


def make(out: Path, **recipe_options: Any) -> dict[str, Any]:
    """Train and write the checkpoint to ``out``; return its recipe with what was measured.

    ``recipe_options`` are fields of :class:`tools.tiny_trained_train.Recipe`.
    """
    from tools import tiny_trained_train

    tiny_trained_train.one_thread()
    size = tiny_trained_train.SIZE
    recipe = tiny_trained_train.Recipe(**recipe_options)
    texts = tiny_trained_data.split_texts(held_out=False)
    out.mkdir(parents=True, exist_ok=True)
    tiny_trained_train.train_tokenizer(texts, size.vocab_size, out / "tokenizer.json")
    tokens = tiny_trained_train.token_stream(texts, out / "tokenizer.json")
    model = tiny_trained_train.new_model(size, recipe)
    report = functools.partial(print, flush=True)
    trained = tiny_trained_train.train(model, tokens, recipe, report)
    data = {
        "text": "sources of the Python standard library, without tests and data tables",
        "files": len(texts),
        "characters": sum(map(len, texts)),
        "tokens": len(tokens),
    }
    return finish(out, model, recipe, data, trained)


def finish(
    out: Path, model: Any, recipe: Any, data: dict[str, Any], trained: dict[str, Any]
) -> dict[str, Any]:
    """Write the trained ``model`` beside its tokenizer in ``out``, measure it, write the recipe."""
    import torch

    from tools import mimo_torch, tiny_trained_train

    size = tiny_trained_train.SIZE
    (out / RECIPE).unlink(missing_ok=True)
    mimo_torch.save_weights(model, out / "model.safetensors", getattr(torch, size.dtype))
    write_configs(size, out)
    rule = f"files whose name's SHA-256 starts with a byte below {tiny_trained_data.HELD_OUT_BYTE}"
    description = {
        "maker": 1,
        "command": f"python -m tools.tiny_trained --seed {recipe.seed}",
        "size": dataclasses.asdict(size),
        "recipe": dataclasses.asdict(recipe),
        "data": {**data, "held_out": rule},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "note": "The same machine, Python and torch make the same weights again; "
        "elsewhere floating-point sums may differ.",
        "training": trained,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_bytes": (out / "model.safetensors").stat().st_size,
        "weights_sha256": weights_sha256(out),
        "held_out_greedy": measure(out),
    }
    write_json(out / RECIPE, description)
    return description


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the tiny MiMo-V2-Flash checkpoint.")
    parser.add_argument(
        "out", type=Path, nargs="?", default=OUT, help=f"directory to write (default: {OUT})"
    )
    parser.add_argument("--steps", type=int, help="steps of the target (default: the recipe's)")
    parser.add_argument("--mtp-steps", type=int, help="steps of the MTP layers, after that")
    parser.add_argument("--seed", type=int, help="seed of the weights and of the text's order")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    given = {name: value for name, value in options.items() if value is not None}
    try:
        description = make(out, **given)
    except RuntimeError as error:
        parser.exit(1, f"tiny_trained: {error}\n")
    print(json.dumps(description["held_out_greedy"], indent=2))
    print(f"{out}: {description['weights_bytes'] / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
