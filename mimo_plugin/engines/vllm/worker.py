# SPDX-License-Identifier: Apache-2.0
"""Worker classes that say what is active before they do what they always did.

vLLM resolves ``parallel_config.worker_cls`` in each worker process. ``activate`` sets it to
``mimo_plugin.engines.vllm.worker.`` plus the original path with ``:`` for ``.``; asking this
module for such a name makes a subclass of the original. So the hook travels with one engine's
configuration: nothing is patched, and another engine in the same process has the stock class.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from mimo_plugin.engines.vllm import register


def __getattr__(name: str) -> Any:
    """Resolve ``package:module:Class`` to our subclass of ``package.module.Class``."""
    if ":" not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _subclass(name)


@lru_cache(maxsize=8)
def _subclass(name: str) -> type:
    module, _, qualname = name.replace(":", ".").rpartition(".")
    stock: Any = getattr(importlib.import_module(module), qualname)

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        rank = kwargs.get("rank", args[1] if len(args) > 1 else 0)
        self.mimo_config = register.activate_worker(vllm_config, int(rank))
        stock.__init__(self, vllm_config, *args, **kwargs)

    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = stock.init_device(self, *args, **kwargs)
        if self.mimo_config is not None and "mtp" in self.mimo_config.features:
            from mimo_plugin.engines.vllm.mtp.configure import install_speculator

            install_speculator(self)
        return done

    members = {"__init__": __init__, "__module__": __name__, "__doc__": stock.__doc__}
    if hasattr(stock, "init_device"):
        members["init_device"] = init_device
    return type(stock.__name__, (stock,), members)
