# SPDX-License-Identifier: Apache-2.0
"""What the keys of pages begin with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def key_space(facts: Mapping[str, object]) -> str:
    """What all keys of one kind of pages begin with: pages of different facts are never mixed up.

    Args:
        facts: everything that decides what the bytes of a page mean.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
