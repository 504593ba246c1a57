# SPDX-License-Identifier: Apache-2.0
"""Engines of one node share what the encoder made: same answers, encoded once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import tiny_omni
from tools.server import engine_environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
VISION = {"features": ["vision"]}
STOCK_MEAN = {"vision": {"mean_std": "stock"}}
IMAGES = 4


class Engine:
    """An engine's process; it starts at once and answers when it is told to."""

    def __init__(self, stack, log_dir, label, model, **settings):
        self.log = log_dir / f"{label}.log"
        self.process = stack.enter_context(
            subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "integration_tests.ec_shared_client"),
                    *(str(model), json.dumps(settings)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(self.log.open("w")),
                text=True,
                cwd=ROOT,
                env=engine_environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
            )
        )
        stack.callback(self.process.kill)

    def answer(self):
        """Answer the prompts; what the engine reports."""
        self._line("READY")
        self._go()
        return json.loads(self._line("RESULT").removeprefix("RESULT "))

    def finish(self):
        """Leave the cache and end."""
        self._go()
        self.process.communicate(timeout=60)

    def _go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def _line(self, start):
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        pytest.fail("the engine ended early:\n" + self.log.read_text()[-4000:])


def caches():
    return {name for name in os.listdir("/dev/shm") if name.startswith("mimo-ec-")}


@pytest.mark.timeout(600)
def test_engines_take_what_another_one_encoded(tmp_path):
    """Encode-only, both and consumer in a row; one that makes other pixels keeps to itself."""
    model = tiny_omni.make(tmp_path / "model")
    name = f"test-{os.getpid()}"
    before = caches()
    with contextlib.ExitStack() as stack:

        def engine(label, **settings):
            return Engine(stack, tmp_path, label, model, **settings)

        shared = {"name": name, "section": VISION}
        encoder = engine("encoder", role="ec_producer", images=IMAGES - 1, **shared)
        both = engine("both", role="ec_both", **shared)
        consumer = engine("consumer", role="ec_consumer", **shared)
        other = engine("other", role="ec_both", name=name, section=STOCK_MEAN)
        alone = engine("alone", section=VISION)
        encoded, taken, all_taken = encoder.answer(), both.answer(), consumer.answer()
        apart, plain = other.answer(), alone.answer()
        for one in (encoder, both, consumer, other, alone):
            one.finish()
    assert plain["encoded"] == apart["encoded"] == IMAGES
    assert (encoded["encoded"], taken["encoded"], all_taken["encoded"]) == (IMAGES - 1, 1, 0)
    assert plain["answers"] == taken["answers"] == all_taken["answers"]
    assert apart["answers"] != plain["answers"]
    assert plain["metrics"] == {}
    assert taken["metrics"]["lookups_total_hit"] == IMAGES - 1
    assert taken["metrics"]["lookups_total_miss"] == taken["metrics"]["stores_total_stored"] == 1
    assert all_taken["metrics"]["lookups_total_hit"] == all_taken["metrics"]["entries"] == IMAGES
    assert all_taken["metrics"]["bytes_total_read"] == all_taken["metrics"]["used_bytes"]
    assert apart["metrics"]["lookups_total_miss"] == IMAGES
    assert "lookups_total_hit" not in apart["metrics"]
    assert caches() == before
