# SPDX-License-Identifier: Apache-2.0
"""Counters on their way: from threads of the API process, and from the worker's process."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from mimo_plugin.engines.vllm.vision.board import BoardReader, BoardWriter, board_path
from mimo_plugin.engines.vllm.vision.names import SETUP_KEY
from mimo_plugin.engines.vllm.vision.report import VisionReport
from tests.vision.conftest import make_setup


def counted(payload):
    return {(name, *labels): value for name, labels, value in payload["inc"]}


def test_totals_of_another_process_are_read_as_differences(tmp_path):
    path = tmp_path / "board"
    reader = BoardReader(path)
    assert reader.drain() is None
    code = (
        "import sys; from pathlib import Path\n"
        "from mimo_plugin.engines.vllm.vision.board import BoardWriter\n"
        "board = BoardWriter(Path(sys.argv[1]))\n"
        "for line in sys.stdin:\n"
        "    board.add('cpu', (1, 3, 0.5, 0.25)); print('added', flush=True)\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for times in (1, 2):
            for _ in range(times):
                worker.stdin.write("go\n")
                worker.stdin.flush()
                assert worker.stdout.readline() == "added\n"
            assert counted(reader.drain()) == {
                ("vision_kernel_passes", "cpu"): times,
                ("vision_kernel_items", "cpu"): 3 * times,
                ("vision_kernel_seconds", "cpu"): 0.5 * times,
                ("vision_encode_seconds", "cpu"): 0.25 * times,
            }
            assert reader.drain() is None
        assert not path.exists(), "nothing is left in shared memory once it was found"
    finally:
        worker.stdin.close()
        worker.wait(timeout=30)


def test_a_worker_that_comes_again_makes_a_new_board(tmp_path):
    first = BoardWriter(tmp_path / "board")
    first.add("triton", (1, 1, 1.0))
    BoardWriter(tmp_path / "board").add("reference", (1, 2, 1.0))
    found = counted(BoardReader(tmp_path / "board").drain())
    assert found[("vision_kernel_items", "reference")] == 2
    assert not any("triton" in key for key in found)


def test_the_place_is_the_engine_s_own():
    def place(setup, rank=0):
        hf_config = SimpleNamespace(**{SETUP_KEY: setup.to_dict()})
        return board_path(
            SimpleNamespace(
                model_config=SimpleNamespace(hf_config=hf_config),
                parallel_config=SimpleNamespace(data_parallel_rank=rank),
            )
        )

    setup, other = make_setup(), make_setup()
    assert place(setup) == place(setup)
    assert len({place(setup), place(setup, 1), place(other)}) == 3


def test_kernel_passes_go_to_the_board(tmp_path):
    report = VisionReport()
    with report.kernel("cpu", 2):
        pass
    report.board = BoardWriter(tmp_path / "board")
    with report.kernel("cpu", 5):
        pass
    with pytest.raises(RuntimeError), report.kernel("cpu", 7):
        raise RuntimeError
    found = counted(BoardReader(tmp_path / "board").drain())
    assert found[("vision_kernel_items", "cpu")] == 5
    assert found[("vision_kernel_passes", "cpu")] == 1
    assert report.drain() is None


def test_threads_lose_nothing():
    report = VisionReport()

    def work():
        for _ in range(200):
            with report.packing():
                report.packed("image", False, 10)
            report.refused("video")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = counted(report.drain())
    assert found[("vision_items", "image", "pixels")] == 800
    assert found[("vision_bytes", "image", "pixels")] == 8000
    assert found[("vision_refused", "video")] == 800
    assert found[("vision_host_seconds",)] > 0
