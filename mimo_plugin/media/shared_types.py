# SPDX-License-Identifier: Apache-2.0
"""What the shared cache gives back: an entry, and counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class CacheCounts:
    """What this process did so far; the processes of a node add up.

    Attributes:
        hits: look-ups that were served.
        misses: look-ups without an entry; mismatches are not among them.
        mismatches: look-ups whose key was there with another length; a miss to the caller.
        stored: entries written.
        refused: entries not written: too large, or everything else is in use.
        evictions: entries freed for new ones.
        recovered: entries of dead writers taken back.
        bytes_read: of the hits.
        bytes_written: of the entries written.
    """

    hits: int = 0
    misses: int = 0
    mismatches: int = 0
    stored: int = 0
    refused: int = 0
    evictions: int = 0
    recovered: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Found:
    """An entry while it is held: ``data`` is a read-only uint8 view into the arena.

    Attributes:
        data: flat bytes, valid until the hold ends.
        shape: of the embedding; the first axis is its length in tokens.
        dtype: its name, as given by the writer.
    """

    data: np.ndarray
    shape: tuple[int, ...]
    dtype: str
