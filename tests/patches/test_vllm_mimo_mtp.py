# SPDX-License-Identifier: Apache-2.0
"""Patch 0004: MiMo-V2 runs one MTP module for each speculative step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.server import is_cpu_build
from tools.tiny_mimo import TinyMiMo, make

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or not is_cpu_build(),
        reason="needs the CPU build of vLLM and the package triton",
    ),
]
CASES = ("v2:1", "v2:3", "v2:3:1", "v2:2:2", "v2:3:2", "v2:6", "v1:3")
"""Runner, speculative tokens and, where the config tells it, the number of MTP layers."""


@pytest.fixture(scope="module")
def drafts(
    tmp_path_factory: pytest.TempPathFactory, probe: Callable[..., Any]
) -> Callable[[Path], Any]:
    """The draft models of a tree, by case."""
    found: dict[Path, Any] = {}

    def drafts_of(tree: Path) -> Any:
        if tree not in found:
            size = TinyMiMo(layers=2, full_every=2, moe_layers=0, hidden_size=64)
            model = make(tmp_path_factory.mktemp("tiny") / "model", size)
            found[tree] = probe("mimo_mtp.py", tree, str(model), *CASES)
        return found[tree]

    return drafts_of


@pytest.fixture
def patched(drafts: Callable[[Path], Any], vllm_patched: Callable[[str], Path]) -> Any:
    """Draft models with the series up to this patch."""
    return drafts(vllm_patched("0004"))


def test_step_i_runs_module_i(patched: Any) -> None:
    draft = patched["v2:3"]
    assert draft["layers"] == 3 and draft["loaded"] == [True, True, True]
    assert draft["layers_of_step"] == [[0], [1], [2]]


def test_modules_are_not_chained(patched: Any) -> None:
    assert patched["v2:3"]["next"] == patched["v2:2:2"]["next"] == "input"


def test_the_config_can_tell_the_number_of_modules(patched: Any) -> None:
    assert patched["v2:2:2"]["layers_of_step"] == [[0], [1]]


def test_more_steps_than_modules_are_refused(patched: Any) -> None:
    for case, modules in (("v2:3:2", 2), ("v2:6", 3)):
        steps = case.split(":")[1]
        assert (
            f"num_speculative_tokens:{steps} must not exceed the number of MTP layers, {modules}"
            in patched[case]["error"]
        )


@pytest.mark.parametrize("case", ["v2:1", "v1:3", "v2:3:1"])
def test_one_step_one_module_and_v1_are_as_before(
    patched: Any, drafts: Callable[[Path], Any], vllm_plain: Path, case: str
) -> None:
    """Among them a checkpoint of one module: that one is reused, and chained."""
    assert patched[case] == drafts(vllm_plain)[case]
    assert patched[case]["layers"] == 1 and patched[case]["next"] == "output"


def test_plain_source_reuses_the_first_module(
    drafts: Callable[[Path], Any], vllm_plain: Path
) -> None:
    """When this fails, the engine builds more of them: see whether the patch can go."""
    plain = drafts(vllm_plain)
    assert {draft["layers"] for draft in plain.values()} == {1}
    assert plain["v2:3"]["layers_of_step"] == [[0], [0], [0]]
