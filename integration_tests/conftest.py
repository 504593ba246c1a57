# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the real-engine tests: tiny checkpoints and ``vllm serve`` processes.

Nothing of an engine is imported here: tests that use one in their own process stay in control of
when that happens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tools import tiny_mimo
from tools.server import VllmServer, engine_environment

ModelFactory = Callable[..., Path]
ServerFactory = Callable[..., VllmServer]

COMMON_ARGUMENTS = (
    "--enforce-eager",
    "--max-model-len=8192",
    "--block-size=16",
    "--max-num-batched-tokens=1024",
    "--max-num-seqs=16",
    "--enable-prompt-tokens-details",
)
"""What every test server gets; a later argument of the same name wins."""


def pytest_configure(config: pytest.Config) -> None:
    """Fail at once where no engine is installed, and set the engine's environment."""
    if find_spec("vllm") is None and find_spec("sglang") is None:
        raise pytest.UsageError("no engine in this environment; run the tests through `make test`")
    os.environ.update(engine_environment())


@pytest.fixture(scope="session")
def tiny_model_factory(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """Make (once per set of sizes) a tiny MiMo checkpoint: ``factory(layers=8, dtype=...)``."""
    made: dict[tiny_mimo.TinyMiMo, Path] = {}

    def factory(**sizes: Any) -> Path:
        size = tiny_mimo.TinyMiMo(**sizes)
        if size not in made:
            made[size] = tiny_mimo.make(tmp_path_factory.mktemp("tiny-mimo"), size)
        return made[size]

    return factory


@pytest.fixture(scope="session")
def tiny_model(tiny_model_factory: ModelFactory) -> Path:
    """The default tiny MiMo checkpoint, fp32."""
    return tiny_model_factory()


@pytest.fixture(scope="session")
def tiny_model_bf16(tiny_model_factory: ModelFactory) -> Path:
    """The default tiny MiMo checkpoint in bfloat16."""
    return tiny_model_factory(dtype="bfloat16")


@contextlib.contextmanager
def _server_factory(log_dir: Path) -> Iterator[ServerFactory]:
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def serve(
            model: Path | str,
            *arguments: str,
            plugin: str | None = None,
            dtype: str = "float32",
            environment: dict[str, str] | None = None,
            **options: Any,
        ) -> VllmServer:
            """Start a server; ``plugin="mimo:kv"`` adds ``--plugin mimo:kv``."""
            chosen = ["--plugin", plugin] if plugin else []
            name = f"server-{next(numbers)}"
            server = VllmServer(
                model,
                arguments=[*COMMON_ARGUMENTS, f"--dtype={dtype}", *chosen, *arguments],
                environment=environment,
                log=log_dir / f"{name}.log",
                name=name,
                **options,
            )
            return stack.enter_context(server)

        yield serve


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[ServerFactory]:
    """Start ``vllm serve`` processes that stop when the test ends."""
    with _server_factory(tmp_path) as factory:
        yield factory


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Start ``vllm serve`` processes that stop when the module's tests are done."""
    with _server_factory(tmp_path_factory.mktemp("servers")) as factory:
        yield factory
