# SPDX-License-Identifier: Apache-2.0
"""B76. No patch: the installed engine applies MiMo-V2's vision sinks, and must go on doing so.

Earlier engines loaded them and left them out of the tower's window blocks (24 of 28):
https://github.com/vllm-project/vllm/issues/47864. When this fails, the engine has lost it again,
and the series needs a patch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.server import is_cpu_build

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or not is_cpu_build(),
        reason="needs the CPU build of vLLM and the package triton",
    ),
]
# Sums of up to 129 products in another order; float16 stores values up to 4 within 2**-9.
BOUNDS = {
    "float32, no groups": 1e-5,
    "float32": 1e-5,
    "float16": 2**-9,
    "float32, rank 1": 1e-5,
}


@pytest.mark.parametrize("case", BOUNDS)
def test_b76_sinks_bias_the_first_key(
    probe: Callable[..., Any], vllm_plain: Path, case: str
) -> None:
    found = probe("vision_sinks.py", vllm_plain)[case]
    assert found["key0"] <= BOUNDS[case]
    # The case tells the rules apart.
    assert min(found["denominator"], found["without"], found["narrower"]) > 0.5
