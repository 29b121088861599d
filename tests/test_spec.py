"""P, patterns and resolve: tables of what they mean, checked against einops' own parser, and of every error text."""

import copy
import itertools
import math
import pickle

import numpy
import optree
import pytest
from einops import parse_shape, rearrange

from spmdfn.errors import SpecError, message
from spmdfn.mesh import make_mesh
from spmdfn.pattern import parse
from spmdfn.spec import P, Resolved, describe, dtype_name, resolve, with_context

MESH = make_mesh((2, 4, 3), ("dp", "tp", "sp"))


# P


def test_p_is_normalised_and_interned():
    assert P("dp", None, ("tp", "sp")).entries == (("dp",), (), ("tp", "sp"))
    assert P(("dp",), ()) is P("dp", None)
    assert P("dp") is not P("dp", None)  # they differ in the least rank
    assert P(unreduced="tp") is P(unreduced={"tp"}) is P(unreduced=iter(["tp"]))
    assert P(unreduced=("sp", "tp")) is P(unreduced=("tp", "sp"))
    assert P("dp", unreduced={"tp"}).unreduced == {"tp"}
    assert P(("tp", "sp")) is not P(("sp", "tp"))
    assert P() is P()
    for spec in (P(), P("dp", None, ("tp", "sp")), P("dp", unreduced=("tp", "sp"))):
        assert pickle.loads(pickle.dumps(spec)) is copy.deepcopy(spec) is spec
        assert eval(repr(spec)) is spec
        assert {spec: 1}[spec] == 1


def test_p_repr():
    assert repr(P("dp", None, ("dp2", "fsdp"))) == "P('dp', None, ('dp2', 'fsdp'))"
    assert repr(P("dp", unreduced={"tp", "sp"})) == "P('dp', unreduced={'sp', 'tp'})"
    assert repr(P()) == "P()"


def test_p_is_a_leaf():
    spec = P("dp", ("tp", "sp"))
    assert not isinstance(spec, tuple)
    assert optree.tree_leaves({"a": spec, "b": [spec]}) == [spec, spec]
    with pytest.raises(TypeError):
        iter(spec)


def test_p_is_immutable():
    with pytest.raises(AttributeError, match=r"P\('dp'\) is immutable; write another P"):
        P("dp").entries = ()
    with pytest.raises(AttributeError, match="immutable"):
        del P("dp").entries


WRONG_P = [
    (lambda: P("dp", "dp"), "axis 'dp' is used twice", "spec: P('dp', 'dp')", "at most one dim"),
    (lambda: P(("dp", "tp"), None, "tp"), "axis 'tp' is used twice", "P(('dp', 'tp'), None, 'tp')"),
    (lambda: P(("dp", "dp")), "axis 'dp' is used twice"),
    (lambda: P("dp", unreduced={"dp"}), "axis 'dp' both splits a dim and is unreduced", "unreduced={'dp'}", "drop it"),
    (lambda: P(3), "the entry 3 is a int", "spec: P(3)", "None, an axis or a tuple of axes"),
    (lambda: P(["dp"]), "the entry ['dp'] is a list"),
    (lambda: P(("dp", None)), "the entry None is a NoneType"),
    (lambda: P((("dp", "tp"), "sp")), "the entry ('dp', 'tp') is a tuple"),
    (lambda: P(P("dp")), "the entry P('dp') is a P"),
    (lambda: P("(dp b) t"), "the entry '(dp b) t' is not an axis name", "plain string, without P"),
    (lambda: P(""), "the entry '' is not an axis name"),
    (lambda: P(unreduced={3}), "the entry 3 is a int"),
    (lambda: P(unreduced=3), "the entry 3 is a int"),
]


@pytest.mark.parametrize("case", WRONG_P, ids=lambda case: case[1])
def test_p_errors(case):
    call, *texts = case
    with pytest.raises(SpecError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


# resolve


RIGHT = [
    (None, (3, 5), ((), ()), {}),
    (None, (), (), {}),
    (P(), (), (), {}),
    (P(), (3, 5), ((), ()), {}),
    (P("dp"), (4, 5), (("dp",), ()), {}),
    (P(None, ("dp", "sp")), (5, 6), ((), ("dp", "sp")), {}),
    (P(("sp", "dp"), "tp"), (6, 4, 1), (("sp", "dp"), ("tp",), ()), {}),
    (P("dp"), (0, 3), (("dp",), ()), {}),
    ("", (), (), {}),
    ("   ", (), (), {}),
    ("b t", (3, 5), ((), ()), {"b": 3, "t": 5}),
    ("(dp b) t (tp d)", (6, 5, 8), (("dp",), (), ("tp",)), {"b": 3, "t": 5, "d": 2}),
    ("((dp sp) b) t", (12, 5), (("dp", "sp"), ()), {"b": 2, "t": 5}),
    ("(dp (sp b))", (12,), (("dp", "sp"),), {"b": 2}),
    ("(sp dp b)", (12,), (("sp", "dp"),), {"b": 2}),
    ("dp t", (2, 5), (("dp",), ()), {"t": 5}),
    ("(dp sp)", (6,), (("dp", "sp"),), {}),
    ("(dp 4 b)", (24,), (("dp",),), {"b": 3}),
    ("(dp 4)", (8,), (("dp",),), {}),
    ("(2 3 b) 7", (12, 7), ((), ()), {"b": 2}),
    ("1 (1 b) ()", (1, 6, 1), ((), (), ()), {"b": 6}),
    ("...", (), (), {}),
    ("...", (3, 5), ((), ()), {}),
    ("(dp b) ...", (4,), (("dp",),), {"b": 2}),
    ("(dp b) ... (tp d)", (4, 9, 9, 8), (("dp",), (), (), ("tp",)), {"b": 2, "d": 2}),
    ("... tp", (5, 4), ((), ("tp",)), {}),
    ("(dp b) b", (6, 3), (("dp",), ()), {"b": 3}),
    ("_ _ (dp _)", (6, 3, 8), ((), (), ("dp",)), {}),
    ("(dp b) t", (0, 3), (("dp",), ()), {"b": 0, "t": 3}),
    ("(dp\tb)\n  größe2", (6, 3), (("dp",), ()), {"b": 3, "größe2": 3}),
]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: f"{case[0]!r} {case[1]}")
def test_resolve(case):
    spec, shape, entries, bound = case
    bindings: dict[str, int] = {}
    resolved = resolve(spec, shape, MESH, bindings=bindings)
    assert isinstance(resolved, Resolved)
    assert resolved == (entries, frozenset())
    assert len(resolved.entries) == len(shape)
    assert bindings == bound
    assert resolve(spec, list(shape), MESH) == resolved


def test_resolve_keeps_unreduced():
    assert resolve(P("dp", unreduced={"tp"}), (4, 3), MESH) == ((("dp",), ()), {"tp"})


def test_axes_are_the_meshs():
    assert resolve("(dp b)", (6,), make_mesh((3,), ("dp",))).entries == (("dp",),)
    assert resolve("dp b", (7, 6), make_mesh((3,), ("x",))).entries == ((), ())
    assert resolve("(one b)", (7,), make_mesh((1,), ("one",))).entries == (("one",),)


def test_names_bind_across_arguments():
    bindings: dict[str, int] = {}
    resolve("(dp b) t", (8, 3), MESH, bindings=bindings)
    resolve("b t", (4, 3), MESH, bindings=bindings)
    resolve(P("dp"), (2,), MESH, bindings=bindings)
    assert bindings == {"b": 4, "t": 3}
    with pytest.raises(SpecError) as caught:
        resolve("b u", (8, 3), MESH, bindings=bindings)
    for text in ("the name 'b' binds two sizes: 4 and 8", 'pattern: "b u"', "shape: (8, 3)", "different names"):
        assert text in str(caught.value)
    resolve("b u", (8, 3), MESH)  # a fresh dict for each call without one


@pytest.mark.parametrize("pattern", ["(dp b) t (tp d)", "((sp tp) b) t d", "b (dp t) (sp tp d)", "(dp 4 b) t d"])
def test_blocks_are_those_of_einops(pattern):
    """Axes as leading dims of einops' view are the blocks of contiguous slices."""
    shape = (24, 8, 24)
    x = numpy.arange(math.prod(shape)).reshape(shape)
    bound: dict[str, int] = {}
    entries = resolve(pattern, shape, MESH, bindings=bound).entries
    axes = [axis for split in entries for axis in split]
    # einops knows neither nested groups nor integers in them
    flat = pattern.replace("((sp tp) b)", "(sp tp b)").replace(" 4 ", " four ")
    local = " ".join(f"({' '.join(str(f) for f in term if f not in axes)})" for term in parse(flat).before)
    sizes = {axis: MESH.shape[axis] for axis in axes} | ({"four": 4} if "four" in flat else {})
    blocks = rearrange(x, f"{flat} -> {' '.join(axes)} {local}", **sizes)
    for place in itertools.product(*(range(MESH.shape[axis]) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        block = x
        for dim, split in enumerate(entries):
            index = 0
            for axis in split:
                index = index * MESH.shape[axis] + at[axis]
            step = shape[dim] // MESH.axis_size(split)
            block = block.take(range(index * step, (index + 1) * step), axis=dim)
        numpy.testing.assert_array_equal(blocks[place], block)


def test_names_are_those_of_einops():
    shape, bindings = (3, 5, 7), {}
    resolve("a _ c", shape, MESH, bindings=bindings)
    assert bindings == parse_shape(numpy.zeros(shape), "a _ c")


def test_parse_is_cached():
    assert parse("(dp b) t") is parse("(dp b) t")


WRONG = [
    (P("pp"), (8,), "unknown axis 'pp'", "the mesh's axes: dp=2, tp=4, sp=3", "spec: P('pp')"),
    (P(None, ("dp", "tpp")), (8, 8), "unknown axis 'tpp'", "'tp' is close"),
    (P(unreduced={"zz"}), (8,), "unknown axis 'zz'"),
    (P("dp", None), (8,), "longer than the rank: 2 entries for the shape (8,)", "at most 1"),
    (P(None), (), "longer than the rank: 1 entries for the shape ()", "a scalar's spec is P()"),
    (P("dp"), (7,), "dim 0 has size 7, which its axes do not divide: dp=2", "pad dim 0 to 8", "shape: (7,)", "whole"),
    (P(None, ("dp", "sp")), (5, 8), "dim 1 has size 8", "dp=2 * sp=3 = 6", "pad dim 1 to 12", "Mesh(dp=2, tp=4, sp=3)"),
    ("(dp b) t", (7, 3), "dim 0 has size 7, which its axes do not divide: dp=2", 'pattern: "(dp b) t"', "free name"),
    ("(dp 4 b)", (12,), "dim 0 has size 12, which (dp 4 b) does not divide: dp=2 * 4 = 8", "a multiple of 8"),
    ("(4 b)", (6,), "dim 0 has size 6, which (4 b) does not divide: 4 = 4"),
    (
        "dp t",
        (8, 3),
        "dim 0 has size 8, but dp without a free name means a size of exactly 2",
        '"(dp b)"',
        "shape: (8, 3)",
    ),
    ("dp b", (8, 3), "dim 0 has size 8", '"(dp b)"'),
    ("(dp sp) t", (12, 3), "(dp sp) without a free name means a size of exactly 6: dp=2, sp=3", '"(dp sp b)"'),
    ("(dp 3)", (8,), "a size of exactly 6", '"(dp 3 b)"'),
    ("3", (5,), "dim 0 has size 5, the pattern says 3", "write 5", '"b"'),
    ("t 1", (5, 2), "dim 1 has size 2, the pattern says 1"),
    ("()", (2,), "dim 0 has size 2, the pattern says 1"),
    ("b t", (5,), "the pattern has 2 dims, the shape (5,) has 1", '"..."'),
    ("b", (5, 6), "the pattern has 1 dim, the shape (5, 6) has 2"),
    ("", (5,), "the pattern has 0 dims, the shape (5,) has 1"),
    ("b", (), "the pattern has 1 dim, the shape () has 0", '"" for a scalar'),
    ("a ... b", (5,), "the pattern has at least 2 dims, the shape (5,) has 1"),
    ("b b", (3, 4), "the name 'b' binds two sizes: 3 and 4", '"_"'),
    ("(dp a) (dp b)", (4, 4), "axis 'dp' is used twice"),
    ("(dp dp a)", (4,), "axis 'dp' is used twice"),
    ("(b t) d", (6, 4), "two free names in the group (b t): 'b', 't'", "the mesh's axes: dp, tp, sp", '"t"'),
    ("(pp b) d", (6, 4), "two free names in the group (pp b): 'pp', 'b'", "the mesh's axes: dp, tp, sp"),
    ("(dp b 4 t)", (6,), "two free names", '"(dp 4 t)"'),
    ("(b dp)", (6,), "the free name 'b' is too early in the group (b dp): the free name comes last", '"(dp b)"'),
    ("(b 3)", (6,), "the free name 'b' is too early", '"(3 b)"'),
    ("(4 dp b)", (8,), "the integer 4 is too early in the group (4 dp b): integers come after the axes", '"(dp 4 b)"'),
    ("... b ...", (4, 4), "an ellipsis twice", "use '...' once"),
    ("(dp ...)", (4, 4), "an ellipsis inside a group", "move it out"),
    ("(dp b", (4,), "unbalanced parentheses: a '(' without its ')'"),
    ("dp b)", (4,), "unbalanced parentheses: a ')' without its '('"),
    ("b, t", (4, 3), "',' is neither a name nor a positive integer", "separated by spaces"),
    ("b -> t", (4, 3), "'-' is neither a name nor a positive integer"),
    ("4b", (4,), "'4b' is neither a name nor a positive integer"),
    ("0 b", (0, 4), "'0' is neither a name nor a positive integer"),
    (("dp", None), (4,), "('dp', None) is a tuple, not a spec", '"(dp b) t"'),
    (3, (4,), "3 is a int, not a spec"),
    (["dp"], (4,), "['dp'] is a list, not a spec"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]!r} {case[1]}")
def test_resolve_errors(case):
    spec, shape, *texts = case
    for _ in range(2):  # the second time is the same: an error is not cached half way
        with pytest.raises(SpecError) as caught:
            resolve(spec, shape, MESH)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        for text in texts:
            assert text in str(caught.value)


def test_an_error_reads_well():
    with pytest.raises(SpecError) as caught:
        resolve("dp t", (8, 3), MESH)
    assert str(caught.value).splitlines() == [
        "dim 0 has size 8, but dp without a free name means a size of exactly 2: dp=2",
        '  pattern: "dp t"',
        "  shape: (8, 3)",
        "  mesh: Mesh(dp=2, tp=4, sp=3)",
        '  fix: write "(dp b)" to split a dim over dp',
    ]


def test_the_suggested_name_is_free():
    mesh = make_mesh((2, 2), ("dp", "b"))
    with pytest.raises(SpecError, match=r'"\(dp n\)"'):
        resolve("dp t", (8, 3), mesh)


def test_with_context():
    error = with_context(SpecError(message("what", "shape: (3,)", fix="this")), "argument: x", "path: x['w']")
    assert isinstance(error, SpecError)
    assert str(error) == "what\n  shape: (3,)\n  argument: x\n  path: x['w']\n  fix: this"
    assert str(with_context(SpecError("what"), "argument: x")) == "what\n  argument: x"


# describe


DTYPES = {
    "torch.float32": "f32",
    "torch.float64": "f64",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.float8_e4m3fn": "f8_e4m3fn",
    "torch.int8": "i8",
    "torch.int16": "i16",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.uint8": "u8",
    "torch.uint32": "u32",
    "torch.bool": "bool",
    "torch.complex32": "c32",
    "torch.complex64": "c64",
    "torch.complex128": "c128",
    "torch.quint8": "quint8",
    "f32": "f32",
}


def test_dtype_name():
    assert {dtype: dtype_name(dtype) for dtype in DTYPES} == DTYPES


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (((("dp",), ("tp",)), (64, 128), "f32"), "f32[64@dp, 128@tp]"),
        (((("dp", "fsdp"), ()), (64, 3), "bf16"), "bf16[64@(dp,fsdp), 3]"),
        (((), (3,), "f32", {"dp"}), "f32[3]{+dp}"),
        (((), (3,), "torch.int64", ("tp", "dp")), "i64[3]{+dp,tp}"),
        (((), (), "bool"), "bool[]"),
    ],
)
def test_describe(args, text):
    assert describe(*args) == text
