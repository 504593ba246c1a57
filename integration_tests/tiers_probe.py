# SPDX-License-Identifier: Apache-2.0
"""Scripts of the feature ``tiers`` on engines in one process; each prints what it found as JSON.

Usage: ``python tiers_probe.py MODEL SCRIPT FOLDER [OPTIONS_JSON]``; the last line is the result.

Several engines run one after the other in one process, as before and after a restart: nothing of
host memory outlives an engine (``tiers_lab.Engine.close``), so what a new one finds comes from the
store.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

from integration_tests.tiers_lab import HOT, PROMPTS, Engine, tokens

CHAT = tokens(5, 700)
CHAT_OUTPUT_TOKENS = 300
NEXT_QUESTION = tokens(6, 40)
STREAMS = 8
STREAM_OUTPUT_TOKENS = (200, 40)
SHORT = [tokens(50 + at, 420) for at in range(4)]
COLD_PROMPTS = 5


def chat(engine):
    """A turn with a long answer, and the next one when the device has forgotten it."""
    first = engine.ask(CHAT, CHAT_OUTPUT_TOKENS)
    if engine.tiered is not None:
        engine.settle()
    engine.forget_device()
    follow = [*CHAT, *first["tokens"], *NEXT_QUESTION]
    second = engine.measured(follow) if engine.tiered is not None else engine.ask(follow)
    return {"first": first, "second": second}


def streams(engine):
    """Chats that all run at the same time, for two turns."""
    history = [tokens(100 + at, 100 + 13 * at) for at in range(STREAMS)]
    rounds = []
    for turn, count in enumerate(STREAM_OUTPUT_TOKENS):
        answers = engine.ask_all(history, count)
        rounds.append(answers)
        history = [
            [*asked, *answer["tokens"], *tokens(200 + STREAMS * turn + at, 60)]
            for at, (asked, answer) in enumerate(zip(history, answers, strict=True))
        ]
    return rounds


def stock(model, folder, options):
    """What vLLM answers with nothing of ours, each prompt without any hit."""
    engine = Engine(model)
    found = {"connector": engine.scheduler.connector is not None}
    for name, prompt in {**PROMPTS, **{f"short{at}": p for at, p in enumerate(SHORT)}}.items():
        engine.forget_device()
        found[name] = engine.ask(prompt)
    found["chat"] = chat(engine)
    engine.forget_device()
    found["streams"] = streams(engine)
    engine.close()
    return found


def hits_from_host(engine):
    """Each prompt with nothing on the device."""
    found = {}
    for name, prompt in PROMPTS.items():
        engine.forget_device()
        found[name] = engine.measured(prompt)
    return found


def host(model, folder, options):
    """Host memory below the device: what is stored, and what each kind of loss costs."""
    engine = Engine(model, options.get("features", ["tiers"]))
    found = {"groups": engine.groups, "unit": engine.tiered.unit_tokens}
    found["block_bytes"] = engine.block_bytes()
    found["cold"] = engine.measured(HOT)
    found["chunks"], found["used_bytes"] = engine.host_chunks(), engine.host_bytes_used()
    found["hits"] = hits_from_host(engine)
    engine.forget_device()
    engine.measured(HOT)
    windows = range(1, engine.groups)
    window_keys = {key for group in windows for key in engine.keys(group)}

    found["A lost"] = engine.lose_host(window_keys.__contains__)
    found["A"] = engine.measured(HOT)
    found["A then from host"] = after_reset(engine, HOT)

    found["C lost"] = sum(engine.lose_device(group, range(11)) for group in windows)
    found["C"] = engine.measured(HOT)
    found["C again"] = engine.measured(HOT)

    found["hole lost"] = engine.lose_device(0, [3, 4, 5])
    found["hole"] = engine.measured(HOT)
    found["hole again"] = engine.measured(HOT)

    head = set(engine.keys(0)[:3])
    found["mixed lost"] = [engine.lose_host(head.__contains__), engine.lose_device(0, range(6, 11))]
    found["mixed"] = engine.measured(HOT)
    found["mixed again"] = engine.measured(HOT)
    found["mixed then from host"] = after_reset(engine, HOT)

    for name, gone in (
        ("B69 no windows", window_keys),
        ("B69 one group", set(engine.keys(3))),
        ("B69 no full", set(engine.keys(0))),
    ):
        engine.lose_host(gone.__contains__)
        found[name] = after_reset(engine, HOT)
    engine.forget_device()
    found["chat"] = chat(engine)
    found["leftovers"] = engine.leftovers()
    engine.close()
    return found


def after_reset(engine, prompt):
    """With nothing on the device."""
    engine.forget_device()
    return engine.measured(prompt)


def dense(model, folder, options):
    """A window at every unit, as without a ladder that grows."""
    engine = Engine(model, ["tiers"], {"ladder_min_tokens": 1, "ladder_growth": 1e-9})
    found = {"cold": engine.measured(HOT), "hits": hits_from_host(engine)}
    engine.close()
    return found


def rotation(model, folder, options):
    """B21: host memory of few rows, filled more than once."""
    engine = Engine(model, ["tiers"], {"host_gib": options["host_gib"], "classes": ["prompt_end"]})
    found = {"rows": engine.manager.primary_tier._num_chunks, "groups": engine.groups}
    found["block_bytes"] = engine.block_bytes()
    found["rounds"] = []
    for seed in range(4):
        engine.measured(tokens(70 + seed, 900))
        found["rounds"].append([engine.host_bytes_used(), engine.host_chunks()])
    found["last"] = after_reset(engine, tokens(73, 900))
    found["first"] = after_reset(engine, tokens(70, 900))
    engine.close()
    return found


def pages(folder):
    return sorted(folder.rglob("*.page"))


def files(model, folder, options):
    """A store of files: exact bytes, a restart, lost and damaged pages."""
    place = {"path": str(folder / "kv"), "capacity_gib": 1, "touch_interval_s": 0}
    engine = Engine(model, ["tiers"], {**place, "classes": ["prompt_end"]})
    found = {"cold": engine.measured(HOT), "block_bytes": engine.block_bytes()}
    found["pages"] = len(pages(folder))
    engine.close()

    engine = Engine(model, ["tiers"], place)
    found["restart"] = engine.measured(HOT)
    for path in pages(folder):
        path.unlink()
    found["B device"] = engine.measured(HOT)
    found["B device pages"] = len(pages(folder))
    for path in pages(folder):
        path.unlink()
    found["B host"] = after_reset(engine, HOT)
    found["B host pages"] = len(pages(folder))
    for path in random.Random(1).sample(pages(folder), 5):
        path.unlink()
    found["B some"] = engine.measured(HOT)
    found["B some again"] = engine.measured(HOT)

    found["damaged"] = []
    for at in (0, 4, 10):
        damage(engine, at)
        engine.forget_host()
        found["damaged"].append(engine.measured(HOT))
    engine.forget_host()
    found["mended"] = engine.measured(HOT)
    found["leftovers"] = engine.leftovers()
    engine.close()
    return found


def damage(engine, block):
    """Change one byte of the page of a full block."""
    tier = engine.store_tier
    (text,) = tier.texts([engine.keys(0)[block]])
    path = tier.store._store._path(text)
    data = bytearray(path.read_bytes())
    data[random.Random(block).randrange(len(data))] ^= 0x10
    path.write_bytes(data)


def folders(model, folder, options):
    """Pages spread over three folders, of which one goes."""
    parts = [folder / f"part{at}" for at in range(3)]
    place = {"path": [str(part) for part in parts], "capacity_gib": 1}
    engine = Engine(model, ["tiers"], place)
    found = {"cold": engine.measured(HOT), "pages": [len(pages(part)) for part in parts]}
    engine.close()
    engine = Engine(model, ["tiers"], place)
    found["restart"] = engine.measured(HOT)
    for path in pages(parts[1]):
        path.unlink()
    engine.forget_host()
    found["one lost"] = engine.measured(HOT)
    engine.close()
    return found


def store_and_restart(model, place, then=None):
    """A prompt through one engine into the store, and to another."""
    engine = Engine(model, ["tiers"], place)
    found = {"cold": engine.measured(HOT)}
    engine.close()
    engine = Engine(model, ["tiers"], place)
    found["restart"] = engine.measured(HOT)
    if then is not None:
        found.update(then(engine))
    engine.close()
    return found


def redis(model, folder, options):
    """A Redis server that is killed at random points of a stream of requests, and comes back."""
    from mimo_plugin.core.circuit import CircuitRule
    from tests.tiers.test_redis_store import Server

    server = Server(Path(options["socket_folder"]))

    def killed(engine):
        ring = engine.store_tier.store
        stores = getattr(ring, "stores", {"": ring}).values()
        for store in stores:
            store._circuit._rule = CircuitRule(period_s=PERIOD_S)
        rng = random.Random(3)
        answers, dead, failures = [], 0, engine.counters()["mimo:tier_failed_calls"]
        for at in range(options["requests"]):
            alive = server.process.poll() is None
            if alive and rng.random() < 0.25:
                server.kill()
            elif not alive and rng.random() < 0.3:
                server.start()
            dead += server.process.poll() is not None
            if rng.random() < 0.5:
                assert engine.llm.reset_prefix_cache(reset_connector=True)
            answers.append([at % len(SHORT), engine.ask(SHORT[at % len(SHORT)])])
        if server.process.poll() is not None:
            server.start()
        back_s = time.monotonic()
        end_s = back_s + 10 * PERIOD_S
        recovered = None
        while recovered is None and time.monotonic() < end_s:
            engine.forget_host()
            if engine.measured(HOT)["moved"].get("mimo:tier_hit_tokens"):
                recovered = time.monotonic() - back_s
        return {
            "answers": answers,
            "dead": dead,
            "failed calls": engine.counters()["mimo:tier_failed_calls"] - failures,
            "recovered_s": recovered,
            "leftovers": engine.leftovers(),
        }

    try:
        return store_and_restart(model, {"store": "redis", "path": server.url}, killed)
    finally:
        if server.process.poll() is None:
            server.kill()


PERIOD_S = 2.0


def mooncake(model, folder, options):
    """A real Mooncake: a master, and a process that holds the memory."""
    return store_and_restart(
        model, {"store": "mooncake", "path": f"mooncake://{options['master']}?buffer_mib=32"}
    )


def keep_alive(model, folder, options):
    """A hot prompt that the device answers, cold ones that fill a small store, and a restart."""
    found = {}
    for name in ("kept", "not kept"):
        # Pages of about two prompts; of the cold ones there are many more.
        place = {
            "path": str(folder / name.replace(" ", "-")),
            "capacity_gib": options["capacity_gib"],
            "touch_interval_s": 0,
            "classes": ["prompt_end"],
        }
        engine = Engine(model, ["tiers"], {**place, "host_gib": 0.02})
        if name == "not kept":
            engine.manager.keep_alive = engine.manager.primary_tier.touch
        calls = counted_calls(engine)
        engine.measured(HOT)
        hits = []
        for at in range(COLD_PROMPTS):
            engine.measured(tokens(300 + at, 520))
            hits.append(engine.measured(HOT)["cached"])
        counted = engine.counters()
        result = {"hits": hits, "calls": calls, "evicted": counted["mimo:tier_pages[evicted]"]}
        engine.close()
        engine = Engine(model, ["tiers"], place)
        result["restart"] = engine.measured(HOT)
        engine.close()
        found[name] = result
    return found


def counted_calls(engine):
    """Calls to the store, and keys in them, by kind; counts go on."""
    store, counts = engine.store_tier.store, {}

    def counting(name, call):
        def counted(keys, *rest):
            before = counts.setdefault(name, [0, 0])
            before[0] += 1
            before[1] += len(keys)
            return call(keys, *rest)

        return counted

    for name in ("exists", "touch", "get", "put"):
        setattr(store, name, counting(name, getattr(store, name)))
    return counts


def pressed(model, folder, options):
    """Streams at the same time in a pool that is too small for them, below it host memory."""
    features = options["features"]
    engine = Engine(model, features, num_gpu_blocks_override=options["blocks"], max_num_seqs=8)
    before = engine.counters()
    found = {"streams": streams(engine)}
    engine.settle()
    moved = engine.counters()
    moved.subtract(before)
    found["moved"] = dict(moved)
    engine.forget_device()
    found["chat"] = chat(engine)
    found["leftovers"] = engine.leftovers()
    found["coordinator"] = type(engine.scheduler.kv_cache_manager.coordinator).__module__
    engine.close()
    return found


def mtp(model, folder, options):
    """Drafts by MTP layers, whose hits need one block more: device and host memory agree."""
    limits = {"block_size": 16, "max_model_len": 512, "max_num_batched_tokens": 96}
    prompts = [tokens(400 + length, length) for length in options["lengths"]]
    engine = Engine(model, **limits)
    found = {"stock": [engine.ask(prompt, MTP_OUTPUT_TOKENS) for prompt in prompts]}
    engine.close()
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    engine = Engine(
        model, ["mtp", "tiers"], {"host_gib": 0.05}, speculative_config=speculation, **limits
    )
    found["lookahead"] = [group.lookahead_blocks for group in engine.tiered.geometry]
    for name in ("cold", "device", "host"):
        if name == "host":
            engine.forget_device()
        found[name] = [engine.measured(prompt, MTP_OUTPUT_TOKENS) for prompt in prompts]
    found["leftovers"] = engine.leftovers()
    engine.close()
    return found


MTP_OUTPUT_TOKENS = 16


def copies(model, folder, options):
    """B67: blocks are stored, overwritten at once, and restored; bytes that differ."""
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from mimo_plugin.engines.vllm.tiers.copy_worker import HostCopyWorker

    blocks, rows, page_bytes = 24, 16, (4096, 2048)
    row_bytes = 2 * SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
    tensors = [torch.zeros(blocks, size, dtype=torch.int8) for size in page_bytes]
    # one group of both tensors, one of a part of the first
    groups = [[(0, 4096), (1, 2048)], [(0, 1000)]]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors],
        [[CanonicalKVCacheRef(at, size) for at, size in refs] for refs in groups],
    )
    region = SharedOffloadRegion(
        engine_id=f"copies-{os.getpid()}",
        num_chunks=rows,
        rank=0,
        kv_bytes_per_chunk=row_bytes,
        cpu_page_size=row_bytes,
    )
    worker = HostCopyWorker(caches, region)
    rng, generator = random.Random(8), torch.Generator().manual_seed(8)
    wrong = moved = 0
    for round_ in range(options["rounds"]):
        count = [rng.randrange(0, 4), rng.randrange(1, 4)]
        source = rng.sample(range(blocks), sum(count))
        target = rng.sample(range(blocks), sum(count))
        chosen = rng.sample(range(rows), sum(count))
        for tensor in tensors:
            tensor.random_(-128, 128, generator=generator)
        before = [tensor.clone() for tensor in tensors]
        worker.submit_store(
            2 * round_, GPULoadStoreSpec(source, count, [0, 0]), CPULoadStoreSpec(chosen)
        )
        for tensor in tensors:
            tensor.fill_(round_ % 100)
        worker.submit_load(
            2 * round_ + 1, CPULoadStoreSpec(chosen), GPULoadStoreSpec(target, count, [0, 0])
        )
        expected = [torch.full_like(tensor, round_ % 100) for tensor in tensors]
        for at, (old, new) in enumerate(zip(source, target, strict=True)):
            for tensor, size in groups[0 if at < count[0] else 1]:
                expected[tensor][new, :size] = before[tensor][old, :size]
        wrong += sum(
            int((one != other).sum()) for one, other in zip(tensors, expected, strict=True)
        )
        moved += sum(result.transfer_size for result in worker.get_finished())
    worker.shutdown()
    return {"wrong_bytes": wrong, "moved_bytes": moved}


def unasked(model, folder, options):
    """Connector of the configuration that each ``additional_config`` leads to."""
    from vllm.engine.arg_utils import EngineArgs

    found = []
    for section in (None, {}, {"features": ["kv", "scheduler"]}):
        more = {} if section is None else {"additional_config": {"mimo": section}}
        config = EngineArgs(model=model, **more).create_engine_config()
        found.append(config.kv_transfer_config is not None)
    return found


def several(model, folder, options):
    """Other scripts one after the other in this process: ``options`` by their names."""
    found = {}
    for name, more in options.items():
        part = folder / name.replace(" ", "-")
        part.mkdir()
        started_s = time.monotonic()
        found[name] = SCRIPTS[more.pop("script", name)](model, part, more)
        print(f"{name}: {time.monotonic() - started_s:.1f} s", file=sys.stderr)
    return found


SCRIPTS = {
    script.__name__: script
    for script in (
        stock,
        host,
        dense,
        rotation,
        files,
        folders,
        redis,
        mooncake,
        keep_alive,
        pressed,
        mtp,
        copies,
        unasked,
        several,
    )
}


def main():
    model, script, folder = sys.argv[1:4]
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    found = SCRIPTS[script](model, Path(folder), options)
    sys.stdout.flush()
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
