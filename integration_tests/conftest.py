# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the real-engine tests: tiny checkpoints, ``vllm serve`` and ``sglang serve``.

Nothing of an engine is imported here: tests that use one in their own process stay in control of
when that happens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from integration_tests.side_by_side import stop_all
from tools import tiny_mimo
from tools.server import EngineServer, SglangServer, VllmServer, engine_environment

ModelFactory = Callable[..., Path]
ServerFactory = Callable[..., Any]
"""``serve(model, *arguments, plugin=…, dtype=…, environment=…)``: a running server."""

COMMON_ARGUMENTS = (
    "--enforce-eager",
    "--max-model-len=8192",
    "--block-size=16",
    "--max-num-batched-tokens=1024",
    "--max-num-seqs=16",
    "--enable-prompt-tokens-details",
)
SGLANG_ARGUMENTS = (
    "--trust-remote-code",
    "--max-total-tokens=2048",
    "--swa-full-tokens-ratio=0.5",
    "--page-size=16",
    "--chunked-prefill-size=512",
    "--max-running-requests=8",
    "--random-seed=0",
    "--enable-metrics",
    "--skip-server-warmup",
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
def _server_factory(
    kind: type[EngineServer], common: Sequence[str], log_dir: Path
) -> Iterator[ServerFactory]:
    numbers = itertools.count()
    running: list[EngineServer] = []

    def serve(
        model: Path | str,
        *arguments: str,
        plugin: str | None = None,
        dtype: str = "float32",
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> EngineServer:
        """Start a server; ``plugin="mimo:kv"`` adds ``--plugin mimo:kv``."""
        chosen = ["--plugin", plugin] if plugin else []
        name = f"server-{next(numbers)}"
        server = kind(
            model,
            arguments=[*common, f"--dtype={dtype}", *chosen, *arguments],
            environment=environment,
            log=log_dir / f"{name}.log",
            name=name,
            **options,
        )
        server.start()
        running.append(server)
        return server

    try:
        yield serve
    finally:
        stop_all(running)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[ServerFactory]:
    """Start ``vllm serve`` processes that stop when the test ends."""
    with _server_factory(VllmServer, COMMON_ARGUMENTS, tmp_path) as factory:
        yield factory


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Start ``vllm serve`` processes that stop when the module's tests are done."""
    logs = tmp_path_factory.mktemp("servers")
    with _server_factory(VllmServer, COMMON_ARGUMENTS, logs) as factory:
        yield factory


@pytest.fixture(scope="module")
def serve_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Start ``sglang serve`` processes that stop when the module's tests are done."""
    logs = tmp_path_factory.mktemp("servers")
    with _server_factory(SglangServer, SGLANG_ARGUMENTS, logs) as factory:
        yield factory
