"""The table's element-wise ops, reductions and norms."""

# ruff: noqa: E501 (one line a case)
from __future__ import annotations

import torch
import torch.nn.functional as F
from laid_out import bools, cn, distinct, ints, n, pos, unit
from versus import case

UNARY = {
    "abs": torch.abs, "neg": torch.neg, "exp": torch.exp, "expm1": torch.expm1, "tanh": torch.tanh, "sin": torch.sin,
    "cos": torch.cos, "atan": torch.atan, "erf": torch.erf, "sigmoid": torch.sigmoid, "square": torch.square,
    "relu": F.relu, "gelu": F.gelu, "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "leaky_relu": F.leaky_relu, "elu": F.elu, "softplus": F.softplus, "hardtanh": F.hardtanh, "mish": F.mish,
    "logsigmoid": F.logsigmoid, "sign": torch.sign, "floor": torch.floor, "round": torch.round, "frac": torch.frac,
    "clamp": lambda x: x.clamp(-0.5, 0.75), "clamp_min": lambda x: x.clamp_min(0), "cube": lambda x: x**3,
    "pow by 2.0": lambda x: x**2.0, "2 to the x": lambda x: 2**x, "add a scalar": lambda x: x + 10,
    "scale": lambda x: x * 10, "divide by a scalar": lambda x: x / 4, "scalar minus x": lambda x: 1 - x,
    "x times x": lambda x: x * x, "x plus x": lambda x: x + x, "isnan": torch.isnan, "x > 0": lambda x: x > 0,
    "x == 1": lambda x: x == 1, "to float32 and back": lambda x: x.float().double(), "to int": lambda x: x.int(),
    "to bool": lambda x: x.bool(), "remainder": lambda x: x % 0.75,
    "nan_to_num": lambda x: (1 / x.round()).nan_to_num(), "dropout of nothing": lambda x: F.dropout(x, 0.5, False),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0), "where of a scalar": lambda x: torch.where(x > 0, x, -1.0),
    "threshold": lambda x: F.threshold(x, 0.1, 5.0), "zeros_like": lambda x: torch.zeros_like(x) + 1 + 0 * x,
    "new_full": lambda x: x.new_full((8, 4), 3.0) * x, "detach": lambda x: x.detach() * x, "glu": lambda x: F.glu(x, 0),
}  # fmt: skip

POSITIVE = {
    "log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "pow by 0.5": lambda x: x**0.5, "10 over x": lambda x: 10 / x, "lgamma": torch.lgamma,
}  # fmt: skip

BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "add with alpha": lambda x, y: torch.add(x, y, alpha=3),
    "atan2": torch.atan2, "maximum": torch.maximum, "minimum": torch.minimum, "fmod": lambda x, y: torch.fmod(x, y + 9),
    "hypot": torch.hypot, "x < y": lambda x, y: x < y, "x != y": lambda x, y: x != y,
    "copysign": torch.copysign, "mse_loss": F.mse_loss, "l1_loss": F.l1_loss, "smooth_l1_loss": F.smooth_l1_loss,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3), "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(y, x, y.square() + 1), "clamp by a tensor": lambda x, y: x.clamp(max=y),
    "where": lambda x, y: torch.where(x > y, x, y * 2), "logical_and": lambda x, y: (x > 0) & (y > 0),
    "xlogy": lambda x, y: torch.xlogy(x, y.exp()),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
}  # fmt: skip

LOSSES = ("loss", "cross")
X, Y = n(8, 4), n(8, 4)

POINTWISE = [
    *[case(name, f, X, free="" if name == "glu" else "each xy (xy)- (yx)-", samples=1) for name, f in UNARY.items()],
    *[case(name, f, pos(8, 4), free="each", samples=1) for name, f in POSITIVE.items()],
    *[
        case(name, f, X, Y, free="" if any(w in name for w in LOSSES) else "each xy,xy (yx)-,(yx)-", samples=1)
        for name, f in BINARY.items()
    ],
    case("div", torch.div, X, pos(8, 4), free="each"),
    case("pow of tensors", torch.pow, pos(8, 4), Y, free="each"),
    case("div rounded down", lambda x, y: torch.div(x, y, rounding_mode="floor"), X, pos(8, 4), free="each"),
    case("floor division", lambda x, y: (x // 0.5, x // y), X, pos(8, 4), diff=(), free="each"),
    case("broadcast a row", lambda x, b: x * b + b, X, n(4), free="x-, -x,x xy,y"),
    case("broadcast a column", lambda x, b: x + b, X, n(8, 1), free="x-,x -y"),
    case("broadcast both", lambda x, y: x - y, n(8, 1), n(1, 4), free="x-,-y x-,"),
    case("add a 0-d tensor", lambda x, y: x + y, X, n(), free="xy, x-,"),
    case("mul by a 0-d tensor", lambda x, y: x * y, X, n(), free="xy, x-,"),
    case("lerp with a weight", torch.lerp, X, Y, unit(8, 4), free="each"),
    case("where with a mask", torch.where, bools(8, 4), X, Y, free="each"),
    case("where of a row", torch.where, bools(4), X, n(8, 1)),
    case("int arithmetic", lambda a, b: (a + b * 3 - 1, a * a, -b), ints(9, 8, 4), ints(9, 8, 4), free="each"),
    case("int division", lambda a, b: (a // b, a % b, a / b), ints(90, 8, 4, low=-40), ints(9, 8, 4, low=1)),
    case("int comparison", lambda a, b: (a > b, a == b, a.bool()), ints(9, 8, 4), ints(9, 8, 4), free="each"),
    case("int to float", lambda a: a.double() / 2, ints(90, 8, 4, low=-40), free="each"),
    case("bit ops", lambda a, b: (a & b, a | 3, a ^ b, ~a, a << 2, a >> 1), ints(64, 8, 4), ints(64, 8, 4)),
    case("bools", lambda a, b: (a & b, a | b, a ^ b, ~a, a.int() + b), bools(8, 4), bools(8, 4), free="each"),
    case("mask times x", lambda m, x: x * m, bools(8, 4), X, free="each"),
    case("type promotion", lambda x, a: x * a + a, X, ints(9, 8, 4), free="each"),
    case("swiglu", lambda x: F.silu(x[..., :4]) * x[..., 4:], n(4, 8), free="x-"),
    case("unary of a 0-d tensor", lambda x: x.exp() + x * x, n()),
    # complex
    case("complex arithmetic", lambda a, b: a * b + a.conj() - 2j * b, cn(8, 4), cn(8, 4), free="each"),
    case("complex parts", lambda a: (a.real * 2, a.imag, a.abs(), a.angle()), cn(8, 4), free="each"),
    case("complex from parts", lambda x, y: torch.complex(x, y).conj(), X, Y, free="each"),
    case("polar", torch.polar, pos(8, 4), Y, free="each"),
    case("view_as_complex", lambda x: torch.view_as_complex(x) * (1 + 2j), n(8, 4, 2), free="x-- -x-"),
    case("view_as_real", lambda a: torch.view_as_real(a * (1 + 2j)), cn(8, 4), free="each"),
    case("view_as_real of conj", lambda a: torch.view_as_real(a.conj().resolve_conj()), cn(8, 4), free="each"),
    case("complex exp", lambda a: (a / 4).exp().sum(0), cn(8, 4)),
    case("complex product", lambda a, b: a @ b.mH, cn(8, 4), cn(8, 4)),
    case("x times 1j", lambda x: (x * 1j).imag, X, free="each"),
    # reductions
    *[
        case(f"{name}{suffix}", lambda x, f=f, kw=kw: f(x, **kw), x, free=free)
        for name, f, x in [
            ("sum", torch.sum, n(8, 4, 4)), ("mean", torch.mean, n(8, 4, 4)), ("var", torch.var, n(8, 4, 4)),
            ("std", torch.std, n(8, 4, 4)), ("amax", torch.amax, n(8, 4, 4)), ("amin", torch.amin, n(8, 4, 4)),
            ("logsumexp", torch.logsumexp, n(8, 4, 4)), ("nansum", torch.nansum, n(8, 4, 4)),
        ]
        for suffix, kw, free in [
            ("", {"dim": (0, 1, 2)}, ""), (" of dim 0", {"dim": 0}, "-xy --(yx)"),
            (" of dims 0 and 2", {"dim": (0, 2)}, "-x-"), (" of the last, kept", {"dim": -1, "keepdim": True}, "xy- (xy)--"),
        ]
    ],
    *[
        case(f"{name} of {what}", lambda x, f=f, kw=kw: f(x, **kw), x)
        for name, f, x in [
            ("all", torch.all, n(8, 4) > -1.5), ("any", torch.any, n(8, 4) > 1), ("argmax", torch.argmax, distinct(8, 4)),
            ("argmin", torch.argmin, distinct(8, 4)), ("prod", torch.prod, unit(8, 4) * 2), ("sum of ints", torch.sum, ints(9, 8, 4)),
            ("count_nonzero", torch.count_nonzero, ints(3, 8, 4)), ("sum of bools", torch.sum, bools(8, 4)),
        ]
        for what, kw in [("everything", {}), ("dim 0", {"dim": 0}), ("dim 1", {"dim": 1})]
    ],
    case("norm", torch.norm, n(8, 4)),
    case("norm of a dim", lambda x: x.norm(dim=1), n(8, 4), free="x-"),
    case("norms of other orders", lambda x: [x.norm(p, 0) for p in (0, 1, 3, float("inf"), float("-inf"))], pos(8, 4)),
    case("norm of a matrix", lambda x: torch.linalg.matrix_norm(x, "fro"), n(2, 8, 4)),
    case("vector_norm", lambda x: torch.linalg.vector_norm(x, dim=(0, 1)), n(8, 4)),
    case("normalize", lambda x: F.normalize(x, dim=1), n(8, 4), free="x-"),
    case("var uncorrected", lambda x: x.var(1, correction=0), n(8, 4), free="x-"),
    case("var_mean", lambda x: torch.var_mean(x, 0), n(8, 4), free="-x"),
    case("std_mean of everything", lambda x: torch.std_mean(x), n(8, 4)),
    case("aminmax", lambda x: torch.aminmax(x, dim=0), distinct(8, 4), free="-x"),
    case("max of everything", lambda x: (x.max(), x.min()), distinct(8, 4)),
    case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), n(8, 4), n(8, 4), free="x-,x-"),
    case("sum in float32", lambda x: x.sum(0, dtype=torch.float32), n(8, 4), close=1e-5),
    case("sum plus a scalar", lambda x: x.sum() + 10, n(8, 4)),
    case("mean times a scalar", lambda x: x.mean(0) * 3 - 1, n(8, 4)),
    case("a loss of means", lambda x, y: ((x - y) ** 2).mean().sqrt(), n(8, 4), n(8, 4)),
    case("mean of a mask", lambda x, m: (x * m).sum(1) / m.sum(1).clamp(min=1), n(8, 4), bools(8, 4), free="x-,x-"),
    # cheap though split on the reduced dim
    case("logsumexp of a long dim", lambda x: x.logsumexp(1), n(4, 32), free="x-", cheap="-x"),
    case("softmax", lambda x: x.softmax(1), n(4, 32), free="x-", cheap="-x"),
    case("softmax of dim 0", lambda x: x.softmax(0), n(32, 4), free="-x", cheap="x-"),
    case("log_softmax", lambda x: x.log_softmax(1), n(4, 32), free="x-", cheap="-x"),
    case("softmax in float32", lambda x: x.softmax(1, dtype=torch.float32), n(4, 32), free="x-", cheap="-x", close=1e-5),
    case("var of a long dim", lambda x: x.var(1), n(4, 32), free="x-", cheap="-x"),
    case("norm of a long dim", lambda x: x.norm(dim=1), n(4, 32), free="x-", cheap="-x"),
    case("argmax of a long dim", lambda x: (x.argmax(1), x.argmin(1, keepdim=True)), distinct(4, 32), free="x-", cheap="-x"),
    case("max with indices", lambda x: x.max(1), distinct(4, 32), free="x-", cheap="-x"),
    case("min with indices", lambda x: x.min(0, keepdim=True), distinct(32, 4), free="-x", cheap="x-"),
    case("topk", lambda x: x.topk(3, 1), distinct(4, 32), free="x-", cheap="-x"),
    case("topk smallest", lambda x: x.topk(2, 0, largest=False), distinct(32, 4), free="-x", cheap="x-"),
    case("cumsum", lambda x: x.cumsum(1), n(4, 32), free="x-", cheap="-x"),
    case("cumsum of ints", lambda x: x.cumsum(0), ints(9, 32, 4), free="-x", cheap="x-"),
    case("prod of a long dim", lambda x: x.prod(1), unit(4, 32) + 1.25, free="x-"),
    case("layer_norm over a split dim", lambda x, w, b: F.layer_norm(x, (32,), w, b), n(4, 32), n(32), n(32), cheap="-x,x,x"),
    case("rms_norm over a split dim", lambda x, w: F.rms_norm(x, (32,), w), n(4, 32), n(32), cheap="-x,x"),
    case("cross_entropy over a split dim", F.cross_entropy, n(4, 32), ints(32, 4), cheap="-x"),
    case("batch_norm over a split batch", lambda x: F.batch_norm(x, None, None, training=True), n(32, 4), cheap="x-"),
    # orders
    case("cumprod", lambda x: x.cumprod(1), unit(8, 4) + 1.25, free="x-"),
    case("cummax", lambda x: x.cummax(1), distinct(4, 8), free="x-"),
    case("logcumsumexp", lambda x: x.logcumsumexp(0), n(8, 4), free="-x"),
    case("sort", lambda x: x.sort(1), distinct(4, 8), free="x-"),
    case("sort downwards", lambda x: x.sort(0, descending=True), distinct(8, 4), free="-x"),
    case("argsort", lambda x: x.argsort(1), distinct(4, 8), free="x-"),
    case("median and kthvalue", lambda x: (x.median(1), x.kthvalue(2, 1)), distinct(4, 8), free="x-"),
]  # fmt: skip
