"""Rollouts that branch: every way is put together of its nodes, and every token of the policy counts once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import SchemaUnknown, WireError
from rollfab.fabric.contract.limits import NODE_COUNT_MAX
from rollfab.fabric.contract.records import Node, Rollout, Span
from tests.support.records import new_rollout


@st.composite
def trees(draw: st.DrawFn) -> Rollout:
    """A tree of up to eight nodes with up to four tokens each, all tokens different."""
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    ends = np.cumsum(sizes).tolist()
    nodes = tuple(Node(draw(st.integers(-1, index - 1)), end) for index, end in enumerate(ends))
    mask = draw(st.lists(st.integers(0, 1), min_size=ends[-1], max_size=ends[-1]))
    spans = tuple(Span(place, place + 1, f"w{place}", place) for place, made in enumerate(mask) if made)
    return new_rollout(
        range(100, 100 + ends[-1]),
        prompt_ids=np.arange(draw(st.integers(0, 2)), dtype=np.int32),
        completion_mask=np.array(mask, np.uint8),
        nodes=nodes,
        spans=spans,
    )


def way_to(rollout: Rollout, leaf: int) -> list[int]:
    """Tokens on the way to a node, found from the leaf upwards."""
    if leaf < 0:
        return list(rollout.prompt_ids)
    start = rollout.nodes[leaf - 1].end if leaf else 0
    return way_to(rollout, rollout.nodes[leaf].parent) + list(rollout.completion_ids[start : rollout.nodes[leaf].end])


@given(trees())
def test_every_leaf_is_a_branch_with_all_that_led_there(rollout: Rollout) -> None:
    parents = {node.parent for node in rollout.nodes}
    leaves = [index for index in range(len(rollout.nodes)) if index not in parents]
    found = rollout.branches()
    assert [[*each.prompt_ids, *each.completion_ids] for each in found] == [way_to(rollout, leaf) for leaf in leaves]


@given(trees())
def test_every_token_counts_once_and_keeps_its_place(rollout: Rollout) -> None:
    counted: list[int] = []
    for branch in rollout.branches():
        places = [place for start, end in branch.pieces for place in range(start, end)]
        assert rollout.completion_ids[places].tolist() == branch.completion_ids.tolist()
        assert rollout.logprobs[places].tolist() == branch.logprobs.tolist()
        made = {place for place, is_made in zip(places, rollout.completion_mask[places], strict=True) if is_made}
        spans = [(places[index], span.worker_id) for span in branch.spans for index in range(span.start, span.end)]
        assert spans == [(place, f"w{place}") for place in sorted(made, key=places.index)]
        counted += [place for place, counts in zip(places, branch.completion_mask, strict=True) if counts]
    assert sorted(counted) == np.flatnonzero(rollout.completion_mask).tolist()


def test_a_rollout_in_one_line_is_its_own_branch() -> None:
    rollout = new_rollout([4, 5, 6])
    [branch] = rollout.branches()
    assert branch.completion_ids is rollout.completion_ids and branch.completion_mask is rollout.completion_mask
    assert (branch.prompt_ids.tolist(), branch.spans, branch.pieces) == ([1, 2, 3], rollout.spans, ((0, 3),))


@given(trees())
def test_a_tree_travels(rollout: Rollout) -> None:
    read = Rollout.decode(rollout.encode())
    assert read.nodes == rollout.nodes and read.spans == rollout.spans


def test_messages_travel_with_their_node() -> None:
    said = [{"role": "tool", "content": "42", "tool_call_id": "a"}]
    assert Rollout.decode(new_rollout([4], nodes=(Node(-1, 1, said),)).encode()).nodes[0].messages == said


@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        ((Node(0, 2),), "node 0 continues 0"),
        ((Node(-2, 2),), "node 0 continues -2"),
        ((Node(-1, 1), Node(2, 2)), "node 1 continues 2"),
        ((Node(-1, 1),), "do not cover 2 tokens"),
        ((Node(-1, 3),), "do not cover 2 tokens"),
        ((Node(-1, 2), Node(0, 1), Node(0, 2)), "do not cover"),
        ((Node(-1, -1), Node(0, 2)), "do not cover"),
        ((Node(-1, 2, ["no message"]),), "messages holds other than dict"),  # type: ignore[list-item]
        ((Node("0", 2),), "parent is str"),  # type: ignore[arg-type]
        ((*[Node(-1, 0)] * NODE_COUNT_MAX, Node(-1, 2)), "too many"),
    ],
)
def test_nodes_that_are_no_tree_are_refused(nodes: tuple[Node, ...], fault: str) -> None:
    with pytest.raises(WireError, match=fault):
        Rollout.decode(new_rollout([4, 5], nodes=nodes).encode())


@pytest.mark.parametrize("places", [((2, 3), (0, 1)), ((0, 2), (1, 3)), ((1, 0), (1, 2))])
def test_spans_that_overlap_or_are_out_of_order_are_refused_where_it_branches(
    places: tuple[tuple[int, int], ...],
) -> None:
    spans = tuple(Span(start, end, "w", 0) for start, end in places)
    with pytest.raises(WireError, match="not in order"):
        Rollout.decode(new_rollout([4, 5, 6], nodes=(Node(-1, 3),), spans=spans).encode())


def test_a_branch_looks_at_its_own_spans_alone() -> None:
    """Each of a chain of turns is asked twice, so there are about as many branches as nodes on the longest."""

    class Counted(tuple[Span, ...]):
        looked = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.looked += 1
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[Span]:
            for index in range(len(self)):
                yield self[index]

    turn_count = 64
    nodes = [Node(-1, 0)]
    for _ in range(turn_count):
        parent = len(nodes) - 1
        nodes += [Node(parent, nodes[-1].end + 4), Node(parent, nodes[-1].end + 8)]
    spans = Counted(Span(node.end - 4, node.end, "w", index) for index, node in enumerate(nodes[1:]))
    rollout = new_rollout(range(nodes[-1].end), nodes=tuple(nodes), spans=spans)

    branches = rollout.branches()

    assert [len(branch.spans) for branch in branches] == [*range(1, turn_count + 1), turn_count]
    piece_count = sum(len(branch.pieces) for branch in branches)
    assert Counted.looked <= piece_count * (2 + (2 * turn_count).bit_length() + 1)


def test_rollouts_of_the_schema_before_are_read() -> None:
    new = new_rollout([4, 5]).encode()
    old = new
    for name in (b',"nodes":[]', b',"sides":[]'):
        assert name in old
        old = old.replace(name, b" " * len(name))
    assert old[:2] == b"rf" and old[2] == 3
    read = Rollout.decode(old[:2] + b"\x01" + old[3:])
    assert read.nodes == () and read.sides == () and read.completion_ids.tolist() == [4, 5]
    for schema in (b"\x00", b"\x04"):
        with pytest.raises(SchemaUnknown, match="upgrade"):
            Rollout.decode(new[:2] + schema + new[3:])
