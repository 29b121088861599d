"""Pytrees: flattening, paths of leaves, specs as a prefix of a tree, specs by rule. None is an empty subtree."""

from __future__ import annotations

import difflib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import optree

from .errors import SpecError, message
from .spec import P, Spec, wrong_type

WHOLE = P()
_SHOWN = 5
_DICTS = (dict, OrderedDict, defaultdict)


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of a tree and its structure; dicts go by sorted keys, None has no leaves.

    >>> flatten({"b": [1, None], "a": 2})[0]
    [2, 1]
    """
    return optree.tree_flatten(tree)


def unflatten(treedef: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The tree of that structure over other leaves; ValueError if their number differs.

    >>> leaves, treedef = flatten({"b": [1, None], "a": 2})
    >>> unflatten(treedef, ["x", "y"])
    {'b': ['y', None], 'a': 'x'}
    """
    return optree.tree_unflatten(treedef, leaves)


def leaf_paths(tree: Any) -> list[str]:
    """The path of every leaf as Python would reach it; `tree` is a tree or its structure.

    >>> leaf_paths({"w": [1, {"x": 2}]})
    ["['w'][0]", "['w'][1]['x']"]
    """
    return [accessor.codify("") for accessor in _structure(tree).accessors()]


def dotted_paths(tree: Any) -> list[str]:
    """The path of every leaf with its keys joined by dots, as rules match them; `tree` is a tree or its structure.

    >>> dotted_paths({"blocks": [{"up.weight": 1}], "head": 2})
    ['blocks.0.up.weight', 'head']
    """
    return [".".join(map(_key, accessor)) for accessor in _structure(tree).accessors()]


def _structure(tree: Any) -> optree.PyTreeSpec:
    return tree if isinstance(tree, optree.PyTreeSpec) else optree.tree_structure(tree)


def _key(entry: optree.PyTreeEntry) -> str:
    # a field of a namedtuple or dataclass has a name besides its place
    for name in ("field", "name"):
        if isinstance(found := getattr(entry, name, None), str):
            return found
    return str(entry.entry)


def broadcast_specs(specs: Any, tree: Any, *, name: str) -> list[Spec]:
    """One spec for each leaf of `tree`, from specs given as a prefix of it: a spec stands for a whole subtree.

    A P, a pattern and None are specs. `name` is the argument that errors speak of. Raises SpecError, with the path,
    if a container of `specs` is not as in `tree`.

    >>> broadcast_specs({"w": P("dp"), "b": None}, {"w": [1, 2], "b": 3}, name="in_specs")
    [None, P('dp'), P('dp')]
    """
    found: list[Spec] = []
    faults = list(_walk(specs, tree, name, found))
    if faults:
        more = f"and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise SpecError(
            message(
                f"the specs do not fit the tree of {name}",
                *faults[:_SHOWN],
                more,
                fix="a spec (P, pattern, None) stands for any subtree; a container must be like the value's",
            )
        )
    return found


def _walk(specs: Any, tree: Any, path: str, found: list[Spec]) -> Iterator[str]:
    """Collect the specs of the leaves; yield the faults."""
    if specs is None or isinstance(specs, P | str):
        found.extend([specs] * len(optree.tree_leaves(tree)))
    elif optree.tree_is_leaf(specs):
        yield f"{path}: {wrong_type(specs).splitlines()[0]}"
    elif tree is None or optree.tree_is_leaf(tree) or _kind(specs) is not _kind(tree):
        yield f"{path}: the value is {_what(tree)}, the specs have {_what(specs)}"
    else:
        yield from _walk_children(specs, tree, path, found)


def _walk_children(specs: Any, tree: Any, path: str, found: list[Spec]) -> Iterator[str]:
    values = _children(tree)
    given = {key: child for key, _, child in _children(specs)}
    keys = [key for key, _, _ in values]
    if len(keys) != len(given) and _kind(tree) is not dict:
        yield f"{path}: the value is {_what(tree)}, the specs have {_what(specs)}"
        return
    if missing := [key for key in keys if key not in given]:
        yield f"{path}: the specs lack {_listed(missing)}; they have {_listed(list(given)) or 'nothing'}"
    if extra := [key for key in given if key not in set(keys)]:
        yield f"{path}: the specs have {_listed(extra)}, which the value lacks; it has {_listed(keys) or 'nothing'}"
    for key, step, child in values:
        if key in given:
            yield from _walk(given[key], child, path + step, found)


def _children(node: Any) -> list[tuple[Any, str, Any]]:
    """Key, step of the path and value of every child."""
    level = optree.tree_flatten_one_level(node)
    entry = level.path_entry_type
    steps = (entry(key, level.type, level.kind).codify("") for key in level.entries)
    return list(zip(level.entries, steps, level.children, strict=True))


def _kind(node: Any) -> type:
    # as for optree, the dict types are one
    return dict if type(node) in _DICTS else type(node)


def _what(node: Any) -> str:
    if node is None:
        return "None"
    shape = getattr(node, "shape", None)
    if optree.tree_is_leaf(node):
        kind = type(node).__name__
        return f"a leaf ({kind})" if shape is None else f"a leaf ({kind} of shape {tuple(shape)})"
    size = len(optree.tree_flatten_one_level(node).children)
    return f"a {type(node).__name__} of {size}"


def _listed(keys: Sequence[Any]) -> str:
    more = ", ..." if len(keys) > _SHOWN else ""
    return ", ".join(map(repr, keys[:_SHOWN])) + more


def tree_specs(tree: Any, rules: Mapping[str, Spec], default: Spec = WHOLE) -> Any:
    """A tree of specs like `tree`: each leaf takes that of the first rule whose glob matches its dotted path.

    In a glob `*` also crosses dots. Leaves that no rule matches take `default`. Raises SpecError for a rule that
    matches no leaf.

    >>> params = {"blocks": [{"up": 1, "down": 2}], "norm": 3}
    >>> tree_specs(params, {"*.up": "(tp n) m", "*.down": P(None, "tp")})
    {'blocks': [{'up': '(tp n) m', 'down': P(None, 'tp')}], 'norm': P()}
    """
    treedef = _structure(tree)
    paths = dotted_paths(treedef)
    if not isinstance(rules, Mapping):
        raise SpecError(
            message(f"tree_specs: rules is a {type(rules).__name__}, not a dict", fix='write {"*.weight": P("tp")}')
        )
    for glob, spec in (*rules.items(), ("default", default)):
        if not isinstance(glob, str):
            raise SpecError(message(f"tree_specs: the rule {glob!r} is a {type(glob).__name__}, not a string"))
        if spec is not None and not isinstance(spec, P | str):
            raise SpecError(f"tree_specs: {glob!r}: {wrong_type(spec)}")
    chosen: list[Spec] = [default] * len(paths)
    # the last write wins, so the first rule writes last
    for glob, spec in reversed(list(rules.items())):
        places = [place for place, path in enumerate(paths) if fnmatchcase(path, glob)]
        if not places:
            raise SpecError(_unmatched(glob, paths))
        for place in places:
            chosen[place] = spec
    return unflatten(treedef, chosen)


def _unmatched(glob: str, paths: list[str]) -> str:
    close = difflib.get_close_matches(glob, paths, n=_SHOWN, cutoff=0.4)
    shown = close or paths[:_SHOWN]
    more = ", ..." if len(paths) > len(shown) else ""
    return message(
        f"tree_specs: the rule {glob!r} matches no leaf",
        f"{'close paths' if close else 'paths'}: {', '.join(map(repr, shown)) or 'none, the tree has no leaves'}{more}",
        fix="correct the glob or drop the rule; paths are keys joined by dots, and * crosses dots",
    )
