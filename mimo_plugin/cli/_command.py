# SPDX-License-Identifier: Apache-2.0
"""A command line that ``mimo flags`` prints."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from mimo_plugin.cli._model import Model
from mimo_plugin.engines.vllm.mtp.checkpoint import UnreadableCheckpoint, count_mtp_layers
from mimo_plugin.errors import one_line, setting_error

MIMO_ARCHITECTURES = "MiMoV2"
"""How the names of MiMo's architectures begin."""

MIN_BLOCK_TOKENS = 16
"""Smallest block that all of vLLM's attention backends accept."""

MAX_BLOCK_TOKENS = 64
"""Largest block that they have in common."""

_BLOCKS_IN_A_WINDOW = 8
"""A hit is rounded down to whole blocks and a checkpoint up to them: at most 1/8 of a window."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line and why each part is in it."""

    arguments: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    @property
    def vector(self) -> list[str]:
        """The words of the command line."""
        return [word for group in self.arguments for word in group]

    def to_text(self) -> str:
        """For a shell, one option a line."""
        return " \\\n  ".join(shlex.join(group) for group in self.arguments)

    def to_json(self) -> str:
        """The argument vector and the notes."""
        return json.dumps({"command": self.vector, "notes": list(self.notes)}, indent=1)


def block_tokens(window_tokens: int) -> int:
    """Block size for a window: the largest power of two that still cuts it into eight."""
    size = MIN_BLOCK_TOKENS
    while size < MAX_BLOCK_TOKENS and 2 * size * _BLOCKS_IN_A_WINDOW <= window_tokens:
        size *= 2
    return size


def check_sizes(model: Model, tp: int, max_len: int | None) -> None:
    """Refuse sizes that no engine takes.

    Raises:
        ConfigError: fewer than one rank, or a length that the model was not made for.
    """
    if tp < 1:
        raise setting_error("--tp", tp, "a number > 0", "choose a divisor of the KV heads")
    longest = model.geometry.max_len_tokens
    if max_len is not None and (max_len < 1 or (longest is not None and max_len > longest)):
        allowed = f"1 to {longest}" if longest is not None else "a number > 0"
        raise setting_error("--max-model-len", max_len, allowed, "choose a shorter length")


def mtp_layers_of(model: Model) -> tuple[int, str]:
    """MTP layers in a checkpoint, or 0 and why there are none (empty: not MiMo-V2)."""
    if not model.architecture.startswith(MIMO_ARCHITECTURES):
        return 0, ""
    try:
        found = count_mtp_layers(model.path)
    except (UnreadableCheckpoint, ImportError, ValueError) as error:
        return 0, f"the MTP layers can't be counted ({one_line(error)})"
    return found, "" if found else "the checkpoint holds no MTP layers"
