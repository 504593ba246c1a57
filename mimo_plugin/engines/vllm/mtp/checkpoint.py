# SPDX-License-Identifier: Apache-2.0
"""How many MTP layers a checkpoint holds. The published ``config.json`` does not say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from mimo_plugin.config import MtpConfig
from mimo_plugin.errors import FeatureUnavailable, one_line

INDEX = "model.safetensors.index.json"
PUBLISHED_LAYERS = 3
"""MTP layers of every published MiMo-V2 checkpoint; taken for weights that are made up."""
_LAYER = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)\.")


class UnreadableCheckpoint(Exception):
    """The names of the weights can't be read without loading them; the message says why."""


def available_layers(
    settings: MtpConfig, model: str, revision: str | None, load_format: str
) -> int:
    """MTP layers that can be built.

    Args:
        settings: ``layers`` stands in for weights whose names can't be read.
        model: directory or Hugging Face name that the draft's weights come from.
        revision: of that name.
        load_format: vLLM's; ``dummy`` weights always have every layer.

    Raises:
        FeatureUnavailable: the number can't be found out, contradicts the setting, or is 0.
    """
    if load_format == "dummy":
        return settings.layers or PUBLISHED_LAYERS
    try:
        found = count_mtp_layers(model, revision)
    except UnreadableCheckpoint as error:
        if settings.layers is not None:
            return settings.layers
        raise FeatureUnavailable(
            "the number of MTP layers can't be read from the weights "
            f"({one_line(error)}); needed: safetensors with their names, or the setting; fix: set "
            f"mimo.mtp.layers ({PUBLISHED_LAYERS} in the published checkpoints)"
        ) from None
    except ValueError as error:
        raise FeatureUnavailable(one_line(error)) from None
    if found == 0:
        raise FeatureUnavailable(
            f"the checkpoint {model!r} holds no MTP layers (tensors model.mtp.layers.N.…); needed: "
            "at least one; fix: serve a checkpoint with them, or leave mtp out of --plugin mimo:…"
        )
    if settings.layers is not None and settings.layers != found:
        raise FeatureUnavailable(
            f"mimo.mtp.layers is {settings.layers} but the checkpoint {model!r} holds {found}; "
            "fix: drop the setting"
        )
    return found


@lru_cache(maxsize=8)
def count_mtp_layers(model: str, revision: str | None = None) -> int:
    """MTP layers ``0 … n-1`` of the checkpoint ``model``, a directory or a Hugging Face name.

    Raises:
        UnreadableCheckpoint: no safetensors file or index can be reached.
        ValueError: the layers are not numbered from 0 without a gap.
    """
    folder = Path(model).expanduser()
    names = _local_names(folder) if folder.is_dir() else _hub_names(model, revision)
    found = sorted({int(match[1]) for name in names if (match := _LAYER.search(name))})
    if found != list(range(len(found))):
        raise ValueError(
            f"the checkpoint {model!r} holds the MTP layers {found}, needed: 0 to {len(found) - 1} "
            "without a gap; fix: download the checkpoint again"
        )
    return len(found)


def _local_names(folder: Path) -> Iterable[str]:
    index = folder / INDEX
    if index.is_file():
        return _indexed(index)
    # Without an index vLLM reads every file.
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnreadableCheckpoint(f"{folder} holds no *.safetensors file")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UnreadableCheckpoint(str(error)) from None
    names: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="np") as weights:
                names.update(weights.keys())
        except (OSError, SafetensorError) as error:  # a Git LFS pointer, half a download
            raise UnreadableCheckpoint(f"{file}: {type(error).__name__}: {error}") from None
    return names


def _hub_names(model: str, revision: str | None) -> Iterable[str]:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise UnreadableCheckpoint(str(error)) from None
    try:
        return _indexed(Path(hf_hub_download(model, INDEX, revision=revision)))
    except EntryNotFoundError:
        raise UnreadableCheckpoint(f"{model} has no {INDEX}") from None
    except Exception as error:  # offline, no such repository, another hub
        raise UnreadableCheckpoint(f"{model}: {type(error).__name__}: {error}") from None


def _indexed(index: Path) -> Iterable[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableCheckpoint(f"{index}: {type(error).__name__}: {error}") from None
    return tuple(names)
