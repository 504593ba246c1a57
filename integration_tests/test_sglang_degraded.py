# SPDX-License-Identifier: Apache-2.0
"""``MIMO_STRICT=0`` on SGLang: what can't run is dropped with a line, and a metric says so."""

from __future__ import annotations

import pytest

from integration_tests.test_sglang_stock import generate, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(serve_sglang, tiny_model_factory):
    model = tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=128)
    arguments = ("--disable-radix-cache",)
    return serve_sglang(
        model, *arguments, plugin="mimo:kv,scheduler", environment={"MIMO_STRICT": "0"}
    )


def test_it_serves_as_stock_and_says_why(server):
    ids = prompt(1, 300)
    first, again = generate(server, ids), generate(server, ids)
    assert first["output_ids"] == again["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 0
    log = server.log_text()
    line = "mimo-plugin is OFF for this engine (MIMO_STRICT=0): feature 'kv' can't run here"
    assert log.count(line) == 1
    assert "features=" not in "".join(x for x in log.splitlines() if "mimo-plugin 0" in x)


def test_the_metric_says_so(server):
    lines = [x for x in server.text("/metrics").splitlines() if x.startswith("mimo:")]
    assert [x.split()[-1] for x in lines if x.startswith("mimo:degraded{")] == ["1.0"], lines
    assert not [x for x in lines if not x.startswith("mimo:degraded")], lines
