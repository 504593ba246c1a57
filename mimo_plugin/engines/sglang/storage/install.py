# SPDX-License-Identifier: Apache-2.0
"""Switching the feature ``tiers`` on in the scheduler's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mimo_plugin.config import MimoConfig
from mimo_plugin.engines.sglang import register
from mimo_plugin.errors import MimoError

_starting: MimoConfig | None = None
"""Set from the process' start until the store is open; None too where the backend was chosen by
SGLang's own arguments, without the feature."""


def install_tiers(config: MimoConfig) -> None:
    """Prepare the process that is about to build its cache.

    Args:
        config: the plugin's configuration.
    """
    global _starting
    _starting = config
    if config.tiers.host_swa_share is not None:
        from mimo_plugin.engines.sglang.storage.hooks import install_host_share

        install_host_share(config.tiers.host_swa_share)


@contextmanager
def start_up() -> Iterator[None]:
    """While the engine starts, an error of ours ends it with one line.

    Raises:
        SystemExit: instead of a ``MimoError``, which SGLang would take for one of its own.
    """
    try:
        yield
    except MimoError as error:
        if _starting is None:
            raise
        raise SystemExit(f"mimo-plugin: error: {error}") from error.__cause__


def started() -> None:
    """The store is open: say so, and from now on errors are SGLang's to report."""
    global _starting
    if _starting is not None:
        register.log_active(register.SCHEDULER_ROLE, _starting)
        _starting = None
