# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint dies first where the engine owns the tree: passed, replaced, then by age."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mimo_plugin.core.checkpoints import CheckpointOrder, Id
from mimo_plugin.core.retention import (
    BOUNDARY,
    CLASSES,
    JUNCTION,
    LADDER,
    NONE,
    PROMPT_END,
    TAIL,
    TURN_END,
)


def deaths(order: CheckpointOrder[Id]) -> list[Id]:
    """Everything, in the order in which it would die."""
    out: list[Id] = []
    while (node_id := order.victim()) is not None:
        out.append(node_id)
        order.gone(node_id)
    return out


def chat(
    order: CheckpointOrder[str], name: str, system: str | None, *ends: tuple[int, str]
) -> None:
    before = system
    for tokens, cls in ends:
        node_id = f"{name}{tokens}"
        order.add(node_id, before, tokens, 8, cls)
        before = node_id


def test_bounds_go_first_then_what_was_replaced_then_old_chats() -> None:
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("system", None, 3008, 8, BOUNDARY)
    chat(order, "a", "system", (3200, TAIL), (3216, PROMPT_END), (3600, TURN_END), (4000, TURN_END))
    chat(order, "b", "system", (3100, LADDER), (3400, TURN_END))
    died = deaths(order)
    assert set(died[:3]) == {"a3200", "a3216", "b3100"}
    assert died[3] == "a3600"
    assert died[4:] == ["a4000", "b3400", "system"]


def test_the_end_of_a_chunk_counts_as_a_rung() -> None:
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("chunk", None, 2048, 8, NONE)
    order.add("end", "chunk", 2500, 8, TURN_END)
    assert order.victim(cheap=True) == "chunk"


def test_the_end_of_a_long_chat_outlives_those_of_short_ones() -> None:
    """Both take one window; what is computed again without it differs."""
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("long", None, 6000, 8, TURN_END)
    for number in range(20):
        order.add(f"short{number}", None, 208, 8, TURN_END)
    died = deaths(order)
    assert died[0] == "short0"
    assert died[-1] == "long"


def test_a_long_chat_that_is_idle_for_long_dies() -> None:
    """Its length slows ageing down; it doesn't stop it."""
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("long", None, 6000, 8, TURN_END)
    for number in range(1000):
        order.add(f"short{number}", None, 208, 8, TURN_END)
        if number >= 20:
            victim = order.victim()
            assert victim is not None
            order.gone(victim)
    assert "long" not in order


def test_a_prefix_that_others_share_is_not_counted_as_a_chat_s_own() -> None:
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("system", None, 6000, 8, BOUNDARY)
    order.add("on it", "system", 6096, 8, TURN_END)
    order.add("alone", None, 2000, 8, TURN_END)
    assert order.victim() == "on it"


def test_use_makes_young() -> None:
    order: CheckpointOrder[str] = CheckpointOrder(16)
    for name in "abc":
        order.add(name, None, 1024, 8, TURN_END)
    order.used("a")
    order.used("never heard of")
    assert deaths(order) == ["b", "c", "a"]


def test_cheap_ones_only() -> None:
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("a", None, 1024, 8, TURN_END)
    assert order.victim(cheap=True) is None
    assert order.victim() == "a"
    assert order.victim() is None, "asked for once"
    order.spared("a")
    assert order.victim() == "a"


def test_a_junction_outlives_the_chats_below_it() -> None:
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("junction", None, 1024, 8, JUNCTION)
    order.add("end", "junction", 2048, 8, TURN_END)
    order.used("end")
    assert order.victim() == "end"


def test_a_checkpoint_made_again_is_alive_again() -> None:
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("system", None, 512, 8, BOUNDARY)
    order.add("end", "system", 1024, 8, TURN_END)
    order.gone("system")
    assert order.ids() == ["end"]
    assert order.nearest(["root", "system", "else"]) == "system", "it still ties the chat to it"
    order.add("system", None, 512, 8, BOUNDARY)
    assert set(order.ids()) == {"system", "end"}
    order.gone("end")
    order.gone("system")
    assert len(order) == 0


def test_an_impossible_parent_is_not_believed() -> None:
    order: CheckpointOrder[str] = CheckpointOrder(16)
    order.add("late", None, 2048, 8, TURN_END)
    order.add("early", "late", 1024, 8, TURN_END)
    order.used("early")
    assert deaths(order) == ["late", "early"]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int, int, str]]:
    step = st.tuples(
        st.sampled_from(["add", "add", "add", "used", "gone", "victim", "spared", "clear"]),
        st.integers(0, 12),
        st.integers(0, 12),
        st.integers(1, 40),
        st.sampled_from([*CLASSES, NONE]),
    )
    return draw(st.lists(step, max_size=60))


@given(histories())
def test_random_histories(history: list[tuple[str, int, int, int, str]]) -> None:
    """Only what lives is named, each at most once, and nothing is forgotten."""
    order: CheckpointOrder[int] = CheckpointOrder(16)
    alive: set[int] = set()
    asked: set[int] = set()
    for what, node_id, parent, pages, cls in history:
        if what == "add":
            order.add(node_id, parent if parent != node_id else None, 16 * (node_id + 1), 2, cls)
            alive.add(node_id)
            asked.discard(node_id)
        elif what == "used":
            order.used(node_id)
            if node_id in alive:
                asked.discard(node_id)
        elif what == "gone":
            order.gone(node_id)
            alive.discard(node_id)
            asked.discard(node_id)
        elif what == "victim":
            chosen = order.victim(cheap=bool(pages % 2))
            if chosen is not None:
                assert chosen in alive
                assert chosen not in asked
                asked.add(chosen)
        elif what == "spared":
            order.spared(node_id)
            if node_id in alive:
                asked.discard(node_id)
        else:
            order.clear()
            alive.clear()
            asked.clear()
        assert set(order.ids()) == alive
        # A node that lost its checkpoint stays only while something hangs on it.
        assert all(n.swa is not None or n.children for n in order._ids)
        if what in ("add", "gone", "used"):
            asked.clear()  # a neighbour's change may make anyone a candidate again
    for node_id in list(alive):
        order.spared(node_id)
    assert set(deaths(order)) == alive
    assert len(order) == 0
