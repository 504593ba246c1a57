# SPDX-License-Identifier: Apache-2.0
"""The section that a ``ServerArgs`` record carries to every process of an engine.

Some of SGLang's processes never load plugins: ranks of an encoder server, further tokenizers. All
get the record, so its section brings the plugin along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Section(dict[str, Any]):
    """A section; the process that unpickles it has the plugin's hooks from then on."""

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (dict(self),)


def restore(values: Mapping[str, Any]) -> Section:
    """The section in another process, or a copy in this one.

    Raises:
        FeatureUnavailable: the plugin can't attach to this process.
    """
    from mimo_plugin.engines.sglang import switch

    switch.join_process()
    return Section(values)
