# SPDX-License-Identifier: Apache-2.0
"""The scheduler feature in real servers: the same answers in another order, and nothing lost.

Four servers with the same small pool: stock, ``--plugin mimo:scheduler``, the same in mode
``fcfs``, and ``--plugin mimo`` (all features) with one request slot and priority scheduling. No
test depends on the speed of the machine: lines of waiting requests are built while the engine is
paused, and orders are read from the plugin's debug log.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from integration_tests.kv_client import alignment_tokens, message
from integration_tests.sched_client import PATIENCE_S, Job, LineClient, Reply, Start
from integration_tests.side_by_side import start_all
from mimo_plugin import __version__
from mimo_plugin.engines.vllm.version import installed_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SLOTS = 6
SIZES = (
    "--num-gpu-blocks-override=120",
    "--max-model-len=2048",
    "--max-num-batched-tokens=128",
    "--long-prefill-token-threshold=64",  # leaves room in a step beside a leader
    f"--max-num-seqs={SLOTS}",
    "--enable-log-requests",
    "--max-log-len=16",
)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
MAX_WAIT_S = 3.0
"""Of the server ``everything`` alone."""


@dataclass(frozen=True)
class Servers:
    """The servers of this module."""

    stock: LineClient
    scheduler: LineClient
    fcfs: LineClient
    everything: LineClient


def section(**settings):
    return f"--additional-config={json.dumps({'mimo': {'scheduler': settings}})}"


@pytest.fixture(scope="module")
def servers(tiny_model, serve_module):
    """All servers, started side by side."""
    kinds = {
        "stock": (None, ()),
        "scheduler": ("mimo:scheduler", ()),
        "fcfs": ("mimo:scheduler", (section(mode="fcfs"),)),
        "everything": (
            "mimo",
            ("--max-num-seqs=1", "--scheduling-policy=priority", section(max_wait_s=MAX_WAIT_S)),
        ),
    }

    def client(plugin, more):
        return lambda: LineClient(
            serve_module(tiny_model, *SIZES, *more, plugin=plugin, environment=ENVIRONMENT)
        )

    return Servers(**start_all({kind: client(*how) for kind, how in kinds.items()}))


@pytest.fixture(scope="module")
def unit(servers):
    return alignment_tokens(servers.stock.server)


def admissions(client):
    return client.counts("mimo:scheduler_admissions_total", "reason")


def more_than(before, after):
    """What counters by label have gained."""
    gains = {label: value - before.get(label, 0) for label, value in after.items()}
    return {label: gain for label, gain in gains.items() if gain}


# --- a burst --------------------------------------------------------------------------------


def burst_jobs():
    """Five rounds, each with a request behind each of six shared prefixes, and two cold ones."""
    rng = random.Random(31)
    prefixes = [message(rng, 640) for _ in range(6)]
    jobs = []
    for turn in range(5):
        for number, prefix in enumerate(prefixes):
            prompt = [*prefix, *message(rng, 32 + 3 * turn)]
            jobs.append(Job(name=f"burst-{number}-{turn}", prompt=prompt))
        for number in range(2):
            jobs.append(Job(name=f"burst-cold-{number}-{turn}", prompt=message(rng, 700)))
    return jobs


@dataclass(frozen=True)
class Burst:
    """What a server made of the burst."""

    replies: dict[str, Reply]
    starts: list[Start]
    reasons: dict[str, float]
    preemptions: float

    @property
    def outputs(self):
        return {name: reply.output for name, reply in self.replies.items()}

    @property
    def cached(self):
        return {name: reply.cached for name, reply in self.replies.items()}

    @property
    def computed(self):
        return sum(reply.computed for reply in self.replies.values())


@pytest.fixture(scope="module")
def bursts(servers):
    """The burst on every server, on an empty cache."""

    def play(kind):
        client = getattr(servers, kind)
        client.idle()
        client.reset_prefix_cache()
        mark, before = client.mark(), admissions(client)
        preempted = client.server.metric("vllm:num_preemptions_total")
        replies = client.run(burst_jobs())
        client.idle()
        return Burst(
            replies,
            client.starts(mark),
            more_than(before, admissions(client)),
            client.server.metric("vllm:num_preemptions_total") - preempted,
        )

    return {kind: play(kind) for kind in ("stock", "scheduler", "fcfs", "everything")}


@pytest.mark.parametrize("kind", ["scheduler", "fcfs", "everything"])
def test_a_burst_gives_the_same_tokens(bursts, kind):
    stock, ours = bursts["stock"], bursts[kind]
    assert ours.outputs == stock.outputs
    assert len({tuple(output) for output in stock.outputs.values()}) == len(burst_jobs())


def test_one_changed_token_changes_the_output(servers, bursts):
    """The control: equal outputs say something, also behind a prefix that others share."""
    job = burst_jobs()[0]
    prompt = [*job.prompt[:5], job.prompt[5] + 1, *job.prompt[6:]]
    changed = replace(job, name="changed", prompt=prompt)
    expected = bursts["stock"].replies[job.name].output
    for client in (servers.stock, servers.scheduler):
        assert client.ask(changed).output != expected
        assert client.ask(replace(job, name="unchanged")).output == expected


def test_affinity_computes_far_fewer_tokens(bursts):
    stock, ours = bursts["stock"], bursts["scheduler"]
    assert stock.preemptions == ours.preemptions == 0
    assert ours.computed <= 0.6 * stock.computed
    assert bursts["everything"].computed <= 0.6 * stock.computed


@pytest.mark.parametrize("kind", ["scheduler", "everything"])
def test_every_start_of_the_burst_has_a_reason(bursts, kind):
    burst = bursts[kind]
    assert burst.reasons["affinity"] > 0
    assert sum(burst.reasons.values()) == len(burst.replies) == len(burst.starts)
    logged = [start.reason for start in burst.starts]
    assert {reason: logged.count(reason) for reason in burst.reasons} == burst.reasons


@pytest.mark.parametrize("kind", ["scheduler", "fcfs", "everything"])
def test_the_log_says_the_hit_that_a_request_was_told(bursts, kind):
    burst = bursts[kind]
    assert {start.name: start.hit for start in burst.starts} == burst.cached


def test_mode_fcfs_is_the_stock_order(servers, bursts):
    """The same order of starts, hence the same evictions, hence the same hits of each request."""
    stock, ours = bursts["stock"], bursts["fcfs"]
    assert [start.name for start in ours.starts] == list(ours.replies)
    assert ours.reasons == {"arrival": len(ours.replies)}
    assert ours.cached == stock.cached
    deferrals = servers.fcfs.counts("mimo:scheduler_deferrals_total", "reason")
    assert not any(deferrals.values())


# --- one slot: order, priority, starvation ---------------------------------------------------


def test_warm_goes_before_cold_also_after_a_pause(servers):
    """The pause is longer than the longest wait, but that does not make anyone overdue."""
    client, rng = servers.everything, random.Random(32)
    prefix = message(rng, 500)
    client.ask(Job(name="order-prime", prompt=prefix))
    cold = [Job(name=f"order-cold-{i}", prompt=message(rng, 550)) for i in range(2)]
    warm = [Job(name=f"order-warm-{i}", prompt=[*prefix, *message(rng, 40)]) for i in range(2)]
    jobs, mark = [cold[0], warm[0], cold[1], warm[1]], client.mark()
    with client.line(jobs):
        time.sleep(MAX_WAIT_S + 0.5)
    starts = client.starts(mark)
    assert [start.name for start in starts] == [job.name for job in (*warm, *cold)]
    assert [start.reason for start in starts[:2]] == ["affinity"] * 2
    assert starts[0].waited_s < MAX_WAIT_S


def test_high_priority_goes_before_older_low_priority(servers):
    """Priority before affinity, affinity within a priority, and a grammar to wait for."""
    client, rng = servers.everything, random.Random(33)
    prefix = message(rng, 500)
    client.ask(Job(name="priority-prime", prompt=prefix))
    cold = Job(name="low-cold", prompt=message(rng, 550), priority=5)
    warm = Job(name="low-warm", prompt=[*prefix, *message(rng, 40)], priority=5)
    high = Job(name="high-cold", prompt=message(rng, 560))
    # When its grammar is ready is not ours to say, so it is in no one's way.
    last = Job(name="last", prompt=message(rng, 570), max_tokens=24, priority=9, more=REGEX)
    jobs, mark = [cold, warm, high, last], client.mark()
    replies = client.run(jobs)
    starts = client.starts(mark)
    assert [start.name for start in starts] == ["high-cold", "low-warm", "low-cold", "last"]
    assert [start.reason for start in starts[:2]] == ["priority", "affinity"]
    for job in jobs:
        expected = servers.stock.ask(replace(job, priority=0))
        assert replies[job.name].output == expected.output
    assert re.fullmatch(PATTERN, replies["last"].text)


def test_a_cold_request_is_served_while_warm_ones_never_end(servers):
    client, rng = servers.everything, random.Random(34)
    prefix = message(rng, 500)
    client.ask(Job(name="stream-prime", prompt=prefix))
    before, mark = admissions(client), client.mark()
    stop = threading.Event()

    def stream(user):
        own = random.Random(user)
        count = 0
        while not stop.is_set():
            prompt = [*prefix, *message(own, 24)]
            client.ask(Job(name=f"stream-{user}-{count}", prompt=prompt, max_tokens=16))
            count += 1

    with ThreadPoolExecutor(9) as pool:
        # Many users for one slot: some of them wait at any time, however slow the clients are.
        users = [pool.submit(stream, user) for user in range(8)]
        try:
            for user in range(8):
                client.until(rf"Added request cmpl-stream-{user}-0-", mark)
            cold = pool.submit(client.ask, Job(name="stream-cold", prompt=message(rng, 900)))
            reply = cold.result(timeout=PATIENCE_S)
        finally:
            stop.set()
        for user in users:
            user.result(timeout=PATIENCE_S)
    assert len(reply.output) == 8
    starts = client.starts(mark)
    at = [start.name for start in starts].index("stream-cold")
    assert starts[at].reason == "max_wait"
    assert MAX_WAIT_S <= starts[at].waited_s < PATIENCE_S
    assert sum(start.reason == "affinity" for start in starts[:at]) >= 3
    client.idle()
    assert more_than(before, admissions(client))["max_wait"] >= 1


# --- clients that leave -----------------------------------------------------------------------


def nothing_waits(client):
    """No request is left anywhere, and the gauges know."""
    client.idle()
    metric = client.server.metric
    assert metric("mimo:waiting_uncached_tokens") == 0
    assert metric("mimo:scheduler_parked_requests") == 0
    assert metric("vllm:kv_cache_usage_perc") == 0


def test_clients_that_leave_the_line_take_nothing_along(servers):
    client, rng = servers.scheduler, random.Random(35)
    prefix = message(rng, 400)
    jobs = [Job(name=f"stay-{i}", prompt=[*prefix, *message(rng, 40)]) for i in range(8)]
    gone = [Job(name=f"gone-{i}", prompt=[*prefix, *message(rng, 50)]) for i in range(6)]
    mark = client.mark()
    with client.line(jobs[:4]) as futures, ThreadPoolExecutor(4) as pool:
        held = {job.name: client.send_and_hold(job) for job in gone}
        for job in jobs[4:]:
            futures[job.name] = pool.submit(client.ask, job)
        for name, connection in held.items():
            client.leave(name, connection)
        client.resume()
    assert {start.name for start in client.starts(mark)} == {job.name for job in jobs}
    for job in jobs:
        assert futures[job.name].result().output == servers.stock.ask(job).output
    nothing_waits(client)


def test_a_parked_follower_may_leave(servers, unit):
    """Followers of one leader: two leave while it prefills, one stays and gets its KV."""
    client, rng = servers.scheduler, random.Random(36)
    prompt = message(rng, 1500)
    leader = Job(name="leader", prompt=prompt)
    stays = Job(name="follower-stays", prompt=[*prompt, *message(rng, 40)])
    leavers = [Job(name=f"follower-{i}", prompt=[*prompt, *message(rng, 50 + i)]) for i in range(2)]
    before = client.counts("mimo:scheduler_deferrals_total", "reason")
    mark = client.mark()
    with client.line([leader, stays]) as futures:
        held = {job.name: client.send_and_hold(job) for job in leavers}
        client.resume()
        for name in held:
            client.until(rf"mimo scheduler: defer cmpl-{name}-0\S* \(duplicate\)", mark)
        client.pause()
        assert [start.name for start in client.starts(mark)] == ["leader"]
        assert "%" not in "".join(re.findall(r"mimo scheduler: defer.*", client.since(mark)))
        for name, connection in held.items():
            client.leave(name, connection)
    assert [start.name for start in client.starts(mark)] == ["leader", "follower-stays"]
    after = client.counts("mimo:scheduler_deferrals_total", "reason")
    assert more_than(before, after) == {"duplicate": 3}
    reply = futures["follower-stays"].result()
    assert reply.cached == len(prompt) // unit * unit
    assert reply.output == servers.stock.ask(stays).output
    nothing_waits(client)


def test_followers_outlive_a_leader_that_leaves(servers):
    client, rng = servers.scheduler, random.Random(37)
    prompt = message(rng, 1500)
    stays = [
        Job(name=f"orphan-{i}", prompt=[*prompt, *message(rng, 40)], max_tokens=4) for i in range(2)
    ]
    mark = client.mark()
    client.pause()
    connection = client.send_and_hold(Job(name="leaver", prompt=prompt))
    with client.line(stays) as futures:
        client.resume()
        for job in stays:
            client.until(rf"mimo scheduler: defer cmpl-{job.name}-0\S* \(duplicate\)", mark)
        client.leave("leaver", connection)
    for job in stays:
        assert futures[job.name].result().output == servers.stock.ask(job).output
    nothing_waits(client)


def test_when_everyone_leaves_the_gauges_return_to_zero(servers):
    """Requests that run and requests that wait, all left alone; no later request tidies up."""
    client, rng = servers.scheduler, random.Random(38)
    jobs = [
        Job(name=f"all-gone-{i}", prompt=message(rng, 200), max_tokens=1500)
        for i in range(SLOTS + 3)
    ]
    mark = client.mark()
    with ExitStack() as stack:
        held = {}
        for job in jobs:
            held[job.name] = client.send_and_hold(job)
            stack.callback(held[job.name].close)
        client.until(rf"mimo scheduler: start cmpl-all-gone-{SLOTS - 1}-0", mark)
        client.pause()
        stack.callback(client.resume)
        for name, connection in held.items():
            client.leave(name, connection)
    nothing_waits(client)


# --- structured output ------------------------------------------------------------------------

PATTERN = "[a-f]{3}-[0-9]{4}"
REGEX = {"structured_outputs": {"regex": PATTERN}, "ignore_eos": False}
SCHEMA = {
    "type": "object",
    "properties": {"sound": {"enum": ["mew", "bark"]}, "loud": {"type": "boolean"}},
    "required": ["sound", "loud"],
    "additionalProperties": False,
}
JSON = {
    "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    "ignore_eos": False,
}


def test_structured_output_beside_plain_requests(servers):
    rng = random.Random(39)
    prefix = message(rng, 300)
    jobs = []
    for number in range(4):
        for kind, more in (("plain", {}), ("regex", REGEX), ("json", JSON)):
            prompt = [*prefix, *message(rng, 20 + 5 * number)]
            name = f"grammar-{kind}-{number}"
            jobs.append(Job(name=name, prompt=prompt, max_tokens=64, more=more))
    stock, ours = servers.stock.run(jobs), servers.scheduler.run(jobs)
    for job in jobs:
        assert ours[job.name].output == stock[job.name].output, job.name
        text = ours[job.name].text
        if "regex" in job.name:
            assert re.fullmatch(PATTERN, text)
        elif "json" in job.name:
            assert json.loads(text).keys() == SCHEMA["properties"].keys()
    nothing_waits(servers.scheduler)


# --- preemption, pause, reset -----------------------------------------------------------------


def long_jobs(label):
    """Prompts that fit into the pool together, and outputs that do not."""
    rng = random.Random(40)
    return [
        Job(name=f"{label}-{i}", prompt=message(rng, 500 + 9 * i), max_tokens=320) for i in range(8)
    ]


@pytest.fixture(scope="module")
def long_outputs(servers):
    replies = servers.stock.run(long_jobs("long"))
    return [reply.output for reply in replies.values()]


def test_preempted_requests_finish_with_the_same_tokens(servers, long_outputs):
    client = servers.scheduler
    client.idle()
    before, preempted = admissions(client), client.server.metric("vllm:num_preemptions_total")
    replies = client.run(long_jobs("preempt"))
    assert [reply.output for reply in replies.values()] == long_outputs
    client.idle()
    preempted = client.server.metric("vllm:num_preemptions_total") - preempted
    gained = more_than(before, admissions(client))
    assert gained["preempted"] == preempted > 0
    assert sum(gained.values()) == len(replies) + preempted
    nothing_waits(client)


def test_reset_of_running_requests_loses_none(servers, long_outputs):
    client, jobs = servers.scheduler, long_jobs("reset")
    mark = client.mark()
    with client.line(jobs) as futures:
        client.resume()
        client.until(rf"mimo scheduler: start cmpl-reset-{SLOTS - 1}-0", mark)
        answer = client.server.post("/reset_prefix_cache?reset_running_requests=true", {})
        assert answer == {"success": True}
    outputs = [future.result().output for future in futures.values()]
    assert outputs == long_outputs
    nothing_waits(client)


def test_a_reset_is_known_to_those_that_wait(servers, unit):
    rng = random.Random(41)
    prompt = message(rng, 400)
    hit = 399 // unit * unit
    for kind in ("scheduler", "everything"):
        client = getattr(servers, kind)
        client.idle()
        client.reset_prefix_cache()

        def cached(name, client=client):
            mark = client.mark()
            reply = client.ask(Job(name=name, prompt=prompt))
            (start,) = client.starts(mark)
            assert start.hit == reply.cached
            return reply.cached

        assert [cached(f"once-{i}") for i in range(2)] == [0, hit]
        client.reset_prefix_cache()
        assert [cached(f"twice-{i}") for i in range(2)] == [0, hit]
        mark = client.mark()
        with client.line([Job(name="waits", prompt=prompt)]) as futures:
            client.reset_prefix_cache()
        assert futures["waits"].result().cached == 0
        (start,) = client.starts(mark)
        assert start.hit == 0
        assert cached("after") == hit
        nothing_waits(client)


# --- what the operator sees -------------------------------------------------------------------


def test_each_process_says_which_features_are_on(servers):
    line = f"mimo-plugin {__version__} | {installed_vllm().label} | process="
    for kind, features in (
        ("scheduler", "scheduler"),
        ("fcfs", "scheduler"),
        ("everything", "kv,scheduler"),
    ):
        server = getattr(servers, kind).server
        for process in ("API", "EngineCore"):
            found = server.log_text().count(f"{line}{process} | features={features} | contracts ok")
            assert found == 1, (kind, process)
        assert server.metric("mimo:info", version=__version__, features=features) == 1
        assert server.metric("mimo:degraded") == 0
    assert "mimo-plugin" not in servers.stock.server.log_text()


def test_stock_shows_no_series_of_ours(servers):
    assert not [name for name in servers.stock.server.metrics() if name.startswith("mimo")]


@pytest.mark.parametrize("kind", ["scheduler", "fcfs", "everything"])
def test_every_start_is_counted_once(servers, kind):
    """Runs last: over all that was asked of the server, by the metrics and by the log."""
    client = getattr(servers, kind)
    client.idle()
    counted = admissions(client)
    logged = [start.reason for start in client.starts(0)]
    assert {reason: logged.count(reason) for reason in counted} == counted
    assert client.server.metric("mimo:queue_wait_s_count") == sum(counted.values()) == len(logged)
    assert client.server.metric("mimo:metrics_dropped_total") == 0
