"""The table's matrix products, attention, convolutions, pools and norms."""

# ruff: noqa: E501 (one line a case)
from __future__ import annotations

import torch
import torch.nn.functional as F
from laid_out import cn, n, pos
from versus import case


def attention(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def by_hand(q, k, v):
    scores = (q @ k.mT) / 2
    scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).tril().logical_not(), float("-inf"))
    return scores.softmax(-1) @ v


def batch_norm(x, w, b, mean, var):
    mean, var = mean.clone(), var.clone()
    y = F.batch_norm(x, mean, var, w, b, training=True, momentum=0.1)
    return y, mean, var


QKV = (n(2, 4, 4, 8), n(2, 4, 4, 8), n(2, 4, 4, 8))
SHARED = (n(2, 8, 4, 8), n(2, 4, 4, 8), n(2, 4, 4, 8))

PRODUCTS = [
    case("mm", torch.mm, n(8, 4), n(4, 8), free="x-, ,-x x-,-y (yx)-,"),
    case("matmul of a batch", torch.matmul, n(4, 8, 4), n(4, 8), free="x--, -x-, ,-x xy-, x--,-y (xy)--,"),
    case("matmul of batches", torch.matmul, n(2, 4, 4, 8), n(4, 8, 4), free="x---, -x--,x-- --x-, "),
    case("matmul of vectors", torch.matmul, n(8), n(8)),
    case("matrix times vector", torch.mv, n(8, 4), n(4), free="x-,"),
    case("vector times matrix", torch.matmul, n(8), n(8, 4), free=",-x"),
    case("bmm", torch.bmm, n(4, 8, 4), n(4, 4, 8), free="x--,x-- -x-, ,--x x--,x-- xy-,x--"),
    case("addmm", lambda b, x, w: torch.addmm(b, x, w), n(8), n(8, 4), n(4, 8), free=",x-, x,,-x"),
    case("addmm scaled", lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=3), n(8, 8), n(8, 4), n(4, 8)),
    case("baddbmm", torch.baddbmm, n(4, 8, 8), n(4, 8, 4), n(4, 4, 8), free="x--,x--,x-- -x-,-x-,"),
    case("addmv and addr", lambda b, x, v: (torch.addmv(b, x, v), torch.addr(x, b, v)), n(8), n(8, 4), n(4)),
    case("linear", F.linear, n(2, 8, 4), n(8, 4), n(8), free="x--,, -x-,, ,x-,x x--,y-,y"),
    case("linear without bias", F.linear, n(8, 4), n(8, 4), free="x-, ,x-"),
    case("two linears", lambda x, a, b: F.linear(F.gelu(F.linear(x, a)), b), n(4, 4), n(8, 4), n(4, 8), free="x-,,"),
    case("bilinear", F.bilinear, n(8, 4), n(8, 4), n(4, 4, 4)),
    case("einsum", lambda x, y: torch.einsum("bthd,bshd->bhts", x, y), n(4, 4, 4, 2), n(4, 4, 4, 2), free="x---,x--- --x-,--x-"),
    case("einsum of three", lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), n(8, 4), n(4, 8), n(8, 4)),
    case("einsum of a trace", lambda x: torch.einsum("bii->b", x), n(4, 8, 8), free="x--"),
    case("einsum of an outer", lambda x, y: torch.einsum("bi,bj->bij", x, y), n(4, 8), n(4, 8), free="x-,x- x-,xy -x,-y"),
    case("tensordot", lambda x, y: torch.tensordot(x, y, 2), n(8, 4, 4), n(4, 4, 8), free="x--, ,--x"),
    case("gram", lambda x: x @ x.mT, n(8, 4)),
    case("cdist", lambda x, y: torch.cdist(x, y), n(8, 4), n(8, 4)),
    case("linear in bfloat16", lambda x, w: F.linear(x.bfloat16(), w.bfloat16()).float(), n(8, 16), n(4, 16), free="x-,", close=3e-2),
    case("autocast by hand", lambda x, w: (x.float() @ w.float()).softmax(-1).double(), n(8, 4), n(4, 8), free="x-,", close=1e-5),
    # attention
    case("attention", attention, *QKV, free="x---,x---,x--- -x--,-x--,-x-- xy--,xy--,xy-- -(yx)--,-(yx)--,-(yx)--", close=1e-6),
    case("attention, causal", lambda *qkv: attention(*qkv, is_causal=True), *QKV, free="x---,x---,x--- xy--,xy--,xy--", close=1e-6),
    case("attention, masked", lambda q, k, v, m: attention(q, k, v, attn_mask=m > 0), *QKV, pos(4, 4) - 0.5, free="x---,x---,x---", close=1e-6),
    case("attention with a bias", lambda q, k, v, m: attention(q, k, v, attn_mask=m), *QKV, n(4, 4, 4), close=1e-6),
    case("attention, grouped", lambda *qkv: attention(*qkv, is_causal=True, enable_gqa=True), *SHARED, free="-x--,-x--,-x--", close=1e-6),
    case("attention by hand", by_hand, *QKV, free="x---,x---,x--- -x--,-x--,-x-- --x-,,"),
    # no rule: gathered and run replicated
    case("inverse", lambda x: torch.linalg.inv(x + 4 * torch.eye(4)), n(4, 4, 4)),
    case("qr", lambda x: torch.linalg.qr(x), n(8, 4)),
    case("cholesky and solve", lambda x, b: torch.cholesky_solve(b, torch.linalg.cholesky(x @ x.mT + torch.eye(4))), n(4, 4), n(4, 8)),
    case("eigenvalues", lambda x: torch.linalg.eigvalsh(x + x.mT), n(4, 4)),
    case("singular values", lambda x: torch.linalg.svdvals(x), n(8, 4)),
    case("determinant", lambda x: torch.linalg.slogdet(x), n(4, 4, 4)),
    case("fft", lambda x: torch.fft.rfft(x, dim=0).abs(), n(8, 4)),
    case("an inverse fft", lambda z: torch.fft.ifft(z).real, cn(4, 8)),
    case("histc", lambda x: x.histc(4, -2, 2), n(8, 4), diff=()),
    # norms
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), n(4, 4, 8), n(8), n(8), free="x--,, -x-,, xy-,,"),
    case("layer_norm of two dims", lambda x: F.layer_norm(x, (4, 8)), n(4, 4, 8), free="x--"),
    case("rms_norm", lambda x, w: F.rms_norm(x, (8,), w), n(4, 4, 8), n(8), free="x--, -x-,"),
    case("rms_norm by hand", lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w, n(4, 4, 8), n(8), free="x--,"),
    case("group_norm", lambda x, w, b: F.group_norm(x, 4, w, b), n(4, 8, 4), n(8), n(8), free="x--,, -x-,x,x"),
    case("instance_norm", lambda x: F.instance_norm(x), n(4, 4, 4), free="x-- -x-"),
    case("batch_norm", batch_norm, n(8, 4, 4), n(4), n(4), n(4), pos(4), diff=(0, 1, 2), free="-x-,x,x,x,x"),
    case("batch_norm evaluated", lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), n(8, 4, 2), n(4), n(4), n(4), pos(4),
         diff=(0, 1, 2), free="x--,,,, -x-,x,x,x,x"),
    # convolutions and pools
    case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), n(4, 4, 4, 4), n(8, 4, 3, 3), n(8), free="x---,, ,x---,x"),
    case("conv2d with strides", lambda x, w: F.conv2d(x, w, stride=2, dilation=2), n(4, 4, 8, 8), n(8, 4, 2, 2), free="x---,"),
    case("conv2d of groups", lambda x, w: F.conv2d(x, w, groups=4), n(4, 8, 4, 4), n(8, 2, 3, 3), free="x---, -x--,x---"),
    case("conv1d, depthwise", lambda x, w: F.conv1d(x, w, groups=4, padding=2), n(2, 4, 8), n(4, 1, 3)),
    case("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, stride=2), n(4, 4, 4, 4), n(4, 8, 2, 2), free="x---,"),
    case("max_pool2d", lambda x: F.max_pool2d(x, 2), n(4, 4, 4, 4), free="x--- -x-- xy--"),
    case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 1, 1), n(4, 4, 4, 4), free="x--- -x--"),
    case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, 3)), n(4, 4, 4, 4), free="x--- -x--"),
    case("adaptive_avg_pool2d to one", lambda x: F.adaptive_avg_pool2d(x, 1), n(4, 4, 4, 4), free="x--- -x--"),
    case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), n(4, 4, 4, 4), free="x--- -x--"),
    case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), n(4, 4, 8), free="x-- -x-"),
    case("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), n(2, 4, 4, 4), free="-x--"),
    case("interpolate to nearest", lambda x: F.interpolate(x, scale_factor=2), n(2, 4, 4, 4), free="-x--"),
    case("unfold and fold", lambda x: F.fold(F.unfold(x, 2, stride=2), 4, 2, stride=2), n(4, 4, 4, 4), free="x---"),
]  # fmt: skip
