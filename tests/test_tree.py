"""Pytrees: round trips, paths, specs as a prefix, specs by rule, and every error text."""

import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import optree
import pytest
import torch

from spmdfn.errors import SpecError
from spmdfn.spec import P
from spmdfn.tree import broadcast_specs, dotted_paths, flatten, leaf_paths, tree_specs, unflatten


class Adam(NamedTuple):
    count: Any
    mu: Any


@optree.dataclasses.dataclass(namespace=optree.registry.__GLOBAL_NAMESPACE)
class Box:
    left: Any
    right: Any


T = torch.zeros(2, 3)

TREES = [
    (1, [""], [""]),
    (None, [], []),
    ({}, [], []),
    ({"b": 1, "a": 2}, ["['a']", "['b']"], ["a", "b"]),
    (
        {"w": [1, Adam(2, {"x": 3})]},
        ["['w'][0]", "['w'][1].count", "['w'][1].mu['x']"],
        ["w.0", "w.1.count", "w.1.mu.x"],
    ),
    ({"blocks.0.up": 1, "n": None}, ["['blocks.0.up']"], ["blocks.0.up"]),
    ((1, (2, [3])), ["[0]", "[1][0]", "[1][1][0]"], ["0", "1.0", "1.1.0"]),
    (OrderedDict(z=1, a=2), ["['z']", "['a']"], ["z", "a"]),
    (deque([1, 2]), ["[0]", "[1]"], ["0", "1"]),
    ({1: "x", 0: "y"}, ["[0]", "[1]"], ["0", "1"]),
    (Box(1, [2]), [".left", ".right[0]"], ["left", "right.0"]),
    ({"p": P("dp"), "s": "(dp b)"}, ["['p']", "['s']"], ["p", "s"]),
]


@pytest.mark.parametrize("case", TREES, ids=lambda case: repr(case[0]))
def test_round_trip_and_paths(case):
    tree, paths, dotted = case
    leaves, treedef = flatten(tree)
    again = unflatten(treedef, leaves)
    assert again == tree
    assert type(again) is type(tree)
    assert leaf_paths(tree) == leaf_paths(treedef) == paths
    assert dotted_paths(tree) == dotted_paths(treedef) == dotted
    assert len(leaves) == len(paths)


def test_dataclass_fixture_is_a_node():
    assert dataclasses.is_dataclass(Box)
    assert flatten(Box(1, 2))[0] == [1, 2]


def test_results_of_torch_are_nodes():
    result = torch.max(T, 1)
    leaves, treedef = flatten(result)
    assert leaf_paths(treedef) == [".values", ".indices"]
    assert type(unflatten(treedef, leaves)) is type(result)


# broadcast_specs


a, b, c = P("a"), P("b"), "(c n)"

RIGHT = [
    (a, {"x": 1, "y": [2, 3]}, [a, a, a]),
    (None, (1, 2), [None, None]),
    (a, None, []),
    (a, {}, []),
    ({}, {}, []),
    ((), (), []),
    ((a, None), (1, {"m": 2, "n": 3}), [a, None, None]),
    ({"y": a, "x": b}, {"x": 1, "y": [2, 3]}, [b, a, a]),
    ({"y": [a, c], "x": None}, {"x": 1, "y": [2, 3]}, [None, a, c]),
    ({"a": a, "n": b}, {"a": 1, "n": None}, [a]),
    ({"a": a, "n": None}, {"a": 1, "n": None}, [a]),
    (Adam(P(), {"w": a}), Adam(T, {"w": [T, T]}), [P(), a, a]),
    (Adam(None, a), Adam(T, [T]), [None, a]),
    (Box(a, b), Box([1, 2], 3), [a, a, b]),
    ({"z": a, "a": b}, OrderedDict(z=1, a=2), [a, b]),
    (defaultdict(list, z=a, a=b), {"z": 1, "a": 2}, [b, a]),
    (a, {"s": "text", "t": 1.5}, [a, a]),
    ([a, [b]], [1, [2]], [a, b]),
]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: f"{case[0]!r} {case[1]!r}")
def test_broadcast(case):
    specs, tree, expected = case
    found = broadcast_specs(specs, tree, name="in_specs")
    assert found == expected
    assert len(found) == len(flatten(tree)[0])


WRONG = [
    ({"x": a}, {"x": 1, "y": 2}, "in_specs: the specs lack 'y'; they have 'x'"),
    ({}, {"x": 1}, "in_specs: the specs lack 'x'; they have nothing"),
    ({"x": a, "z": b}, {"x": 1}, "in_specs: the specs have 'z', which the value lacks; it has 'x'"),
    ({"w": {"z": b}}, {"w": {"x": 1}}, "in_specs['w']: the specs lack 'x'", "in_specs['w']: the specs have 'z'"),
    ((a,), (1, 2), "in_specs: the value is a tuple of 2, the specs have a tuple of 1"),
    ({"w": [a, b]}, {"w": [1]}, "in_specs['w']: the value is a list of 1, the specs have a list of 2"),
    ((a, b), [1, 2], "the value is a list of 2, the specs have a tuple of 2"),
    ((a, b), Adam(1, 2), "the value is a Adam of 2, the specs have a tuple of 2"),
    (Adam(a, b), (1, 2), "the value is a tuple of 2, the specs have a Adam of 2"),
    (
        {"w": ("a", None)},
        {"w": T},
        "in_specs['w']: the value is a leaf (Tensor of shape (2, 3)), the specs have a tuple",
    ),
    ([a], "text", "the value is a leaf (str), the specs have a list of 1"),
    ({"m": {"w": a}}, {"m": None}, "in_specs['m']: the value is None, the specs have a dict of 1"),
    ({"m": {}}, {"m": None}, "the value is None, the specs have a dict of 0"),
    ({"w": 3}, {"w": T}, "in_specs['w']: 3 is a int, not a spec"),
    ({"w": torch.float32}, {"w": [T]}, "in_specs['w']: torch.float32 is a dtype, not a spec"),
    ((Adam(3, a),), (Adam(1, 2),), "in_specs[0].count: 3 is a int, not a spec"),
    (Box(a, [b]), Box(1, (2,)), "in_specs.right: the value is a tuple of 1, the specs have a list of 1"),
    (deque([a]), deque([1, 2]), "the value is a deque of 2, the specs have a deque of 1"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[2])
def test_broadcast_errors(case):
    specs, tree, *texts = case
    with pytest.raises(SpecError) as caught:
        broadcast_specs(specs, tree, name="in_specs")
    for text in ("the specs do not fit the tree of in_specs", *texts, "fix: a spec (P, pattern, None)"):
        assert text in str(caught.value)


def test_broadcast_lists_several_faults():
    with pytest.raises(SpecError) as caught:
        broadcast_specs([3] * 8, [T] * 8, name="params")
    lines = str(caught.value).splitlines()
    assert len(lines) == 8
    assert lines[1] == "  params[0]: 3 is a int, not a spec"
    assert lines[6] == "  and 3 more"


# tree_specs


PARAMS = {
    "blocks": [{"up": {"weight": T, "bias": T}, "down": {"weight": T, "bias": None}} for _ in range(2)],
    "head.weight": T,
    "state": Adam(T, (T,)),
}


def test_tree_specs():
    specs = tree_specs(PARAMS, {"blocks.1.up.*": a, "*.up.weight": "(tp n) m", "head.weight": None, "*mu*": b})
    up = "(tp n) m"
    assert specs == {
        "blocks": [
            {"up": {"weight": up, "bias": P()}, "down": {"weight": P(), "bias": None}},
            {"up": {"weight": a, "bias": a}, "down": {"weight": P(), "bias": None}},
        ],
        "head.weight": None,
        "state": Adam(P(), (b,)),
    }
    leaves = broadcast_specs(specs, PARAMS, name="params")
    assert dict(zip(dotted_paths(PARAMS), leaves, strict=True)) == {
        "blocks.0.down.weight": P(),
        "blocks.0.up.bias": P(),
        "blocks.0.up.weight": up,
        "blocks.1.down.weight": P(),
        "blocks.1.up.bias": a,
        "blocks.1.up.weight": a,
        "head.weight": None,
        "state.count": P(),
        "state.mu.0": b,
    }


def test_first_match_wins():
    assert tree_specs({"x": 1, "y": 2}, {"x": a, "*": b}) == {"x": a, "y": b}
    # a rule that an earlier one hides does match something
    assert tree_specs({"x": 1}, {"*": b, "x": a}) == {"x": b}


def test_tree_specs_globs():
    tree = {"Up": 1, "up": 2, "w1": 3, "w2": 4}
    assert tree_specs(tree, {"up": a, "w[1]": b, "w?": c}, default=None) == {"Up": None, "up": a, "w1": b, "w2": c}
    assert tree_specs(T, {"*": a}) is a
    assert tree_specs({}, {}) == {}
    assert tree_specs({"n": None}, {}) == {"n": None}
    assert tree_specs(torch.nn.Linear(2, 3).state_dict(), {"*": a}) == OrderedDict(weight=a, bias=a)


@pytest.mark.parametrize(
    ("rules", "texts"),
    [
        (
            {"*.up.wieght": a},
            ["the rule '*.up.wieght' matches no leaf", "close paths: 'blocks.", "up.weight'", "* crosses dots"],
        ),
        ({"zzz": a}, ["the rule 'zzz' matches no leaf", "paths: 'blocks.0.down.weight'", ", ..."]),
        ({"*": a, "nothing": b}, ["the rule 'nothing' matches no leaf"]),
        ({"*": 3}, ["tree_specs: '*': 3 is a int, not a spec"]),
        ({"*": ("tp", None)}, ["('tp', None) is a tuple, not a spec", '"(dp b) t"']),
        ({3: a}, ["the rule 3 is a int, not a string"]),
        ([("*", a)], ["rules is a list, not a dict", '{"*.weight": P("tp")}']),
    ],
)
def test_tree_specs_errors(rules, texts):
    with pytest.raises(SpecError) as caught:
        tree_specs(PARAMS, rules)
    for text in texts:
        assert text in str(caught.value)


def test_tree_specs_wrong_default():
    with pytest.raises(SpecError, match=r"default.*3 is a int, not a spec"):
        tree_specs(PARAMS, {}, default=3)


def test_a_rule_for_an_empty_tree():
    with pytest.raises(SpecError, match="none, the tree has no leaves"):
        tree_specs({}, {"*": a})
