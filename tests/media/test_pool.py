# SPDX-License-Identifier: Apache-2.0
"""The pool: a job that hangs, crashes or is dropped costs itself only, and nothing is left over."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mimo_plugin.media.limits import DecoderCrashed, DecodeTimeout, MediaError
from mimo_plugin.media.pool import JobFailed, MediaPool, PoolBusy, PoolClosed, PoolSettings
from tests.media import jobs

ROOT = Path(__file__).parents[2]


def make_pool(**settings):
    return MediaPool(PoolSettings(**{"workers": 1, "preload": (), **settings}))


@pytest.fixture
def pool():
    made = make_pool()
    yield made
    made.close(grace_s=0.0)


def wait_until(holds, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.01)


def open_segments():
    """Segments that this process holds, by descriptor or mapping."""
    held = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            held.append(os.readlink(fd))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in held + mapped if "mimo-media" in line]


def named_segments():
    """Segments that have a name in /dev/shm and so outlive a process; others have files there."""
    return [name for name in os.listdir("/dev/shm") if "mimo-media" in name]


# -- results ---------------------------------------------------------------------------------


def test_arrays_arrive_in_order_with_shape_and_content(pool):
    shapes = [[2, 3, 3], [0, 4], [5]]
    meta, arrays = pool.run_sync(jobs.filled, b"\x01\x02", shapes=shapes, first=7)
    assert meta == [3, 2]
    assert [list(array.shape) for array in arrays] == shapes
    assert [set(array.ravel()) for array in arrays] == [{7}, set(), {9}]
    assert all(array.dtype == np.uint8 and array.flags.writeable for array in arrays)


@pytest.mark.parametrize("length", [0, 1, 64 << 10, (64 << 10) + 1, 3_000_001])
def test_data_of_any_length_arrives(pool, length):
    data = np.random.default_rng(length).bytes(length)
    _, (array,) = pool.run_sync(jobs.twice, memoryview(data))
    assert array.tobytes() == data + data


def test_workers_import_no_engine_and_inherit_nothing(pool):
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        seen = pool.run_sync(jobs.describe).meta
    assert not {"torch", "vllm", "transformers", "sglang"} & set(seen["modules"])
    assert seen["pid"] != os.getpid()
    # standard streams, the socket and its copy, the null device, and the listing itself
    assert len(seen["fds"]) <= 7, seen["fds"]


def test_nothing_runs_before_the_first_job(pool):
    assert pool.stats().workers == 0
    pool.run_sync(jobs.filled, shapes=[])
    assert pool.stats().workers == 1


def test_jobs_run_side_by_side_and_the_loop_stays_free():
    pool = make_pool(workers=2)

    async def play():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        pids = await asyncio.gather(*(pool.run(jobs.sleep, seconds=0.3) for _ in range(4)))
        ticking.cancel()
        return {result.meta for result in pids}, ticks

    try:
        pids, ticks = asyncio.run(play())
    finally:
        pool.close(grace_s=0.0)
    assert len(pids) == 2
    assert ticks >= 5


# -- faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hang", [jobs.sleep, jobs.spin_without_release])
def test_a_hanging_job_is_ended_and_the_next_one_runs(pool, hang):
    options = {"seconds": 600} if hang is jobs.sleep else {}
    first = pool.run_sync(jobs.describe).meta["pid"]
    with pytest.raises(DecodeTimeout, match=r"allowed: 0\.3 s"):
        pool.run_sync(hang, timeout_s=0.3, **options)
    assert pool.run_sync(jobs.describe).meta["pid"] != first
    assert not Path(f"/proc/{first}").exists()
    stats = pool.stats()
    assert (stats.timeouts, stats.workers, stats.workers_started) == (1, 1, 2)


@pytest.mark.parametrize(
    ("job", "how"), [(jobs.crash, "signal SIGSEGV"), (jobs.leave, "exit status 3")]
)
def test_a_crash_costs_its_own_job_only(job, how):
    pool = make_pool(workers=2)

    async def play():
        return await asyncio.gather(
            pool.run(jobs.sleep, seconds=0.5),
            pool.run(job),
            pool.run(jobs.filled, shapes=[[4]]),
            return_exceptions=True,
        )

    try:
        slow, crashed, after = asyncio.run(play())
    finally:
        pool.close(grace_s=0.0)
    assert isinstance(slow.meta, int) and len(after.arrays) == 1
    assert isinstance(crashed, DecoderCrashed) and how in str(crashed)
    assert pool.stats().crashes == 1


def test_nonsense_on_the_socket_is_a_crash_of_that_job(pool):
    with pytest.raises(DecoderCrashed):
        pool.run_sync(jobs.talk_nonsense)
    assert pool.run_sync(jobs.filled, shapes=[]).meta == [0, 0]


def test_a_worker_that_died_idle_is_replaced_without_an_error(pool):
    pid = pool.run_sync(jobs.describe).meta["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "State:\tZ" in Path(f"/proc/{pid}/status").read_text())
    assert pool.run_sync(jobs.describe).meta["pid"] != pid


def test_errors_are_typed_and_the_worker_goes_on(pool):
    pid = pool.run_sync(jobs.describe).meta["pid"]
    with pytest.raises(MediaError, match="^image: found nothing; allowed: something$"):
        pool.run_sync(jobs.refuse)
    with pytest.raises(JobFailed, match="KeyError: 'a bug of the job'"):
        pool.run_sync(jobs.fail)
    assert pool.run_sync(jobs.describe).meta["pid"] == pid


def test_a_worker_can_take_no_more_private_memory_than_allowed():
    pool = make_pool(worker_memory_bytes=1 << 30)
    try:
        assert pool.run_sync(jobs.eat_memory, length=1 << 20).meta == 1
        with pytest.raises(JobFailed, match="MemoryError"):
            pool.run_sync(jobs.eat_memory, length=2 << 30)
    finally:
        pool.close(grace_s=0.0)


def test_a_function_without_a_name_is_refused_before_it_is_queued(pool):
    with pytest.raises(ValueError, match="allowed: a function of an importable module"):
        pool.run_sync(lambda data, allocate: None)
    assert pool.stats().workers == 0


@pytest.mark.parametrize(
    "setting",
    [{"workers": 0}, {"max_queued": 0}, {"job_timeout_s": 0}, {"memory_bytes": -1}],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}: found .*; allowed: above 0"):
        PoolSettings(**setting)


# -- back-pressure ---------------------------------------------------------------------------


def test_the_queue_is_bounded_and_says_its_depth():
    pool = make_pool(max_queued=1, queue_timeout_s=0.3)

    async def play():
        running = asyncio.create_task(pool.run(jobs.sleep, seconds=1.5))
        await asyncio.sleep(0)
        while pool.stats().running == 0:
            await asyncio.sleep(0.01)
        queued = asyncio.create_task(pool.run(jobs.filled, shapes=[]))
        await asyncio.sleep(0.05)
        assert pool.stats().queued == 1
        with pytest.raises(PoolBusy, match="queue of 1 jobs"):
            await pool.run(jobs.filled, shapes=[])
        with pytest.raises(PoolBusy):
            await asyncio.to_thread(pool.run_sync, jobs.filled, shapes=[])
        await running
        assert (await queued).meta == [0, 0]
        assert (await pool.run(jobs.filled, shapes=[])).meta == [0, 0]

    try:
        asyncio.run(play())
    finally:
        pool.close(grace_s=0.0)
    stats = pool.stats()
    assert (stats.jobs_refused, stats.jobs_done, stats.queued) == (2, 3, 0)


def test_callers_wait_for_a_place_and_get_it_in_turn():
    pool = make_pool(max_queued=1)

    async def play():
        order = []

        async def job(number):
            await pool.run(jobs.filled, shapes=[[number]])
            order.append(number)

        await asyncio.gather(*(job(number) for number in range(8)))
        return order

    try:
        assert asyncio.run(play()) == list(range(8))
    finally:
        pool.close(grace_s=0.0)


def test_memory_in_use_is_bounded_and_comes_back_with_the_last_array():
    pool = make_pool(memory_bytes=1000, queue_timeout_s=0.3)
    try:
        _, arrays = pool.run_sync(jobs.filled, shapes=[[600], [300]])
        assert pool.stats().outstanding_bytes == 900
        with pytest.raises(PoolBusy, match="allowed: 1000 bytes"):
            pool.run_sync(jobs.filled, shapes=[[200]])
        part = arrays[0][:10]
        del arrays  # the first segment lives on in `part`
        assert pool.stats().outstanding_bytes == 600
        assert pool.run_sync(jobs.filled, shapes=[[400]]).meta == [0, 0]
        del part
        assert pool.stats().outstanding_bytes == 0
    finally:
        pool.close(grace_s=0.0)


def test_a_job_that_waits_for_memory_is_not_timed_out():
    pool = make_pool(memory_bytes=1000)
    try:
        _, held = pool.run_sync(jobs.filled, shapes=[[800]])
        holder = [held]
        del held
        threading.Timer(0.8, holder.clear).start()
        assert pool.run_sync(jobs.filled, shapes=[[800]], timeout_s=0.5).meta == [0, 0]
    finally:
        pool.close(grace_s=0.0)


def test_an_array_beyond_the_whole_budget_is_the_inputs_fault():
    pool = make_pool(memory_bytes=1000)
    try:
        with pytest.raises(MediaError, match="found 1001 bytes; allowed: up to 1000"):
            pool.run_sync(jobs.filled, shapes=[[1001]])
        assert pool.run_sync(jobs.filled, shapes=[[1000]]).meta == [0, 0]
    finally:
        pool.close(grace_s=0.0)


# -- nothing is left over --------------------------------------------------------------------


def test_no_segment_outlives_its_job(pool):
    for job in (jobs.crash, jobs.sleep):
        with pytest.raises(MediaError):
            options = {"seconds": 60} if job is jobs.sleep else {}
            pool.run_sync(job, timeout_s=2.0, shape=[1 << 20], **options)
    result = pool.run_sync(jobs.filled, shapes=[[1 << 20]])
    assert len(open_segments()) == 2  # the mapping, and the descriptor it keeps
    del result
    gc.collect()
    assert open_segments() == []
    assert pool.stats().outstanding_bytes == 0
    assert named_segments() == []


def test_a_cancelled_job_leaves_the_queue_and_its_result_is_dropped(pool):
    async def play():
        running = asyncio.create_task(pool.run(jobs.sleep, seconds=0.5, shape=[1000]))
        while pool.stats().running == 0:
            await asyncio.sleep(0.01)
        queued = asyncio.create_task(pool.run(jobs.filled, shapes=[[1000]]))
        await asyncio.sleep(0.05)
        for task in (queued, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert pool.stats().queued == 0
        await pool.run(jobs.filled, shapes=[])  # behind the one that could not be stopped

    asyncio.run(play())
    gc.collect()
    assert pool.stats().jobs_done == 2  # the dropped one never ran
    assert pool.stats().outstanding_bytes == 0
    assert open_segments() == []


def test_close_ends_processes_and_fails_what_waits(pool):
    pid = pool.run_sync(jobs.describe).meta["pid"]

    async def play():
        tasks = [asyncio.create_task(pool.run(jobs.sleep, seconds=60)) for _ in range(3)]
        while pool.stats().running == 0:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(pool.close, 0.1)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in asyncio.run(play())] == [PoolClosed] * 3
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(PoolClosed):
        pool.run_sync(jobs.describe)
    pool.close()


def run_script(text, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


# -- lanes -----------------------------------------------------------------------------------


def started(pool, function, **options):
    """A call that ends with the pool."""

    def call():
        with pytest.raises(PoolClosed):
            pool.run_sync(function, **options)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_long_jobs_leave_every_process_for_pictures_alone():
    pool = make_pool(workers=2, job_timeout_s=20.0, max_queued=2)
    calls = [started(pool, jobs.sleep, seconds=60, timeout_s=60.0) for _ in range(2)]
    wait_until(lambda: pool.stats_by_lane()["long"].running == len(calls))
    waiting = started(pool, jobs.sleep, seconds=60, timeout_s=60.0)
    wait_until(lambda: pool.stats_by_lane()["long"].queued == 1)
    assert pool.run_sync(jobs.filled, shapes=[]).meta == [0, 0]
    assert pool.stats_by_lane()["short"].workers == 1
    assert (pool.stats().jobs_done, pool.stats().running) == (1, 2)
    pool.close(grace_s=0.0)
    for thread in (*calls, waiting):
        thread.join(20)
        assert not thread.is_alive()


def test_long_jobs_yield_to_others_on_a_core():
    pool = make_pool(job_timeout_s=20.0)
    usual = pool.run_sync(jobs.describe).meta["niceness"]
    assert pool.run_sync(jobs.describe, timeout_s=60.0).meta["niceness"] == min(19, usual + 5)
    pool.close()


def test_pictures_and_their_memory_leave_room_for_long_jobs():
    pool = make_pool(workers=1, job_timeout_s=20.0, memory_bytes=1000)
    held = pool.run_sync(jobs.filled, shapes=[[1000]])
    busy = started(pool, jobs.sleep, seconds=60)
    wait_until(lambda: pool.stats().running == 1)
    _, (array,) = pool.run_sync(jobs.filled, shapes=[[1000]], timeout_s=60.0)
    assert array.size == held.arrays[0].size
    pool.close(grace_s=0.0)
    busy.join(20)
    assert not busy.is_alive()


SCRIPT = """
    import os, sys, threading, time
    from mimo_plugin.media.pool import MediaPool, PoolSettings
    from tests.media import jobs
    pool = MediaPool(PoolSettings(workers=1, preload=()))
    print(pool.run_sync(jobs.describe).meta["pid"], flush=True)
    {then}
"""


@pytest.mark.parametrize("how", ["exits", "is killed", "is killed in a job"])
def test_workers_end_with_the_process_that_owns_them(how):
    then = {
        "exits": "sys.exit(0)",
        "is killed": "time.sleep(60)",
        "is killed in a job": "pool.run_sync(jobs.spin_without_release, timeout_s=0.5)",
    }[how]
    with run_script(SCRIPT.format(then=then)) as process:
        pid = int(process.stdout.readline())
        if how != "exits":
            time.sleep(0.2)
            process.kill()
        process.wait(timeout=20)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert named_segments() == []


def test_a_forked_child_gets_a_pool_of_its_own():
    then = """
    parent = pool.stats().workers_started
    child = os.fork()
    pid = pool.run_sync(jobs.describe).meta["pid"]
    print(child == 0, parent, pool.stats().workers_started, pid, flush=True)
    if child == 0:
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    print(pool.run_sync(jobs.describe).meta["pid"], flush=True)
    """
    then = textwrap.indent(textwrap.dedent(then), "    ")
    with run_script(SCRIPT.format(then=then)) as process:
        out, _ = process.communicate(timeout=60)
    first, *sides, last = out.splitlines()
    sides = dict(line.split(" ", 1) for line in sides)
    assert sides["False"] == f"1 1 {first}"  # the parent's worker goes on
    assert sides["True"].startswith("1 1 ") and sides["True"] != sides["False"]
    assert last == first  # also after the child has closed its own
