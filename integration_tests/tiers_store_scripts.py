# SPDX-License-Identifier: Apache-2.0
"""Scripts of :mod:`tiers_probe` with a store below host memory."""

import random
import threading
import time
from pathlib import Path

from integration_tests.tiers_lab import HOT, SHORT, Engine, after_reset, tokens

COLD_PROMPTS = 5
PERIOD_S = 1.0
"""For which the breaker leaves a store alone in these scripts, at most."""


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
    guarded = getattr(tier.store, "stores", {"": tier.store}).values()
    (path,) = [path for each in guarded if (path := each._store._path(text)).exists()]
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

    server = Server(Path(options["place"]))

    def killed(engine):
        ring = engine.store_tier.store
        stores = getattr(ring, "stores", {"": ring}).values()
        for store in stores:
            store._circuit._rule = CircuitRule(period_s=PERIOD_S)
        rng = random.Random(1)
        answers, kills, dead = [], 0, 0
        failures = engine.counters()["mimo:tier_failed_calls"]
        for _ in range(options["requests"]):
            which = rng.randrange(2)
            if rng.random() < 0.6:
                engine.forget_host()
            killer = None
            if server.process.poll() is not None:
                if rng.random() < 0.5:
                    server.start()
            elif rng.random() < 0.25:
                kills += 1
                killer = threading.Timer(0.3 * rng.random(), server.kill)
                killer.start()
            answers.append([which, engine.ask(SHORT[which])])
            if killer is not None:
                killer.join()
            dead += server.process.poll() is not None
        if server.process.poll() is not None:
            server.start()
        back_s = time.monotonic()
        end_s = back_s + 10 * PERIOD_S
        recovered = None
        while recovered is None and time.monotonic() < end_s:
            engine.forget_host()
            if engine.measured(SHORT[0])["moved"].get("mimo:tier_hit_tokens"):
                recovered = time.monotonic() - back_s
        return {
            "answers": answers,
            "kills": kills,
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


def mooncake(model, folder, options):
    """A real Mooncake: a master, and a process that holds the memory."""
    return store_and_restart(
        model, {"store": "mooncake", "path": f"mooncake://{options['place']}?buffer_mib=32"}
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
