"""The table's views and other ops that move data, and ops that index by numbers."""

# ruff: noqa: E501 (one line a case)
from __future__ import annotations

import torch
import torch.nn.functional as F
from laid_out import bools, cn, n
from versus import case

A, B = n(8, 4), n(8, 4)


def slice_write(x, y):
    x = x.clone()
    x[:, 1:3] = y * 2
    x[4:] += 1
    return x


def in_place(x):
    x = x.clone()
    x[:, 1:3] += 2
    x.mul_(2)
    return x


def in_place_views(x):
    y = torch.zeros_like(x)
    y.view(-1)[::2].add_(x.reshape(-1)[::2])
    y.t().copy_(y.t() * 3)
    return y + x


SHAPES = [
    case("view merged", lambda x: x.view(32, 4), n(8, 4, 4), free="x-- --x (xy)-- (yx)-- x-y"),
    case("view flat", lambda x: x.view(-1), n(8, 4), free="x- (xy)- (yx)-"),
    case("view split", lambda x: x.view(4, 8, 4), n(32, 4), free="x- (xy)- -x (yx)-"),
    case("view there and back", lambda x: x.view(32, 4).exp().view(8, 4, 4), n(8, 4, 4), free="x-- -x- xy- (yx)--"),
    case("reshape across", lambda x: x.reshape(4, 8), n(8, 4), free="x- (xy)-"),
    case("reshape of a transpose", lambda x: x.t().reshape(-1), n(8, 4), free="-x -(yx)"),
    case("heads", lambda x: x.view(2, 4, 4, 2).transpose(1, 2), n(2, 4, 8), free="--x --(xy) x-y -x-"),
    case("heads and back", lambda x: x.transpose(1, 2).flatten(2), n(2, 4, 4, 2), free="-x-- x--- -(yx)-- xy--"),
    case("unflatten", lambda x: x.unflatten(-1, (4, -1)) * 2, n(4, 8), free="-x x- xy"),
    case("permute", lambda x: x.permute(2, 0, 1), n(8, 4, 4), free="each x-y"),
    case("transpose", lambda x: x.mT, n(2, 8, 4), free="-x- --x x--"),
    case("movedim", lambda x: x.movedim(0, -1), n(8, 4, 4), free="each"),
    case("expand", lambda x: x.expand(8, 4, 4) * 2, n(4, 1), free="x-"),
    case("expand from a scalar", lambda x: x.expand(8, 4), n()),
    case("repeat", lambda x: x.repeat(2, 3), n(8, 4)),
    case("repeat_interleave", lambda x: x.repeat_interleave(2, 1), n(4, 8), free="-x x- -(xy)"),
    case("tile of heads", lambda x: x[:, :, None].expand(2, 4, 2, 8).reshape(2, 8, 8), n(2, 4, 8), free="-x- x-- --x"),
    case("squeeze and unsqueeze", lambda x: x[None, :, None].squeeze(0).squeeze(), n(8, 4), free="each"),
    case("cat", lambda x, y: torch.cat([x, y, x], 0), A, B, free="-x,-x"),
    case("cat of dim 1", lambda x, y: torch.cat([x, y], 1), A, n(8, 8), free="x-,x-"),
    case("stack", lambda x, y: torch.stack([x, y], 1), A, B, free="x-,x- -x,-x"),
    case("stack of scalars", lambda x: torch.stack([x.sum(), x.mean(), x.amax()]), A),
    case("split", lambda x: x.split(2, 1), n(8, 4), free="x-"),
    case("split of unequal", lambda x: x.split([3, 5], 0), n(8, 4), free="-x"),
    case("chunk of qkv", lambda x: x.chunk(3, -1), n(4, 12), free="x-"),
    case("unbind", lambda x: x.unbind(1), n(8, 3), free="x-"),
    case("unbind of a split dim", lambda x: x.unbind(0), n(4, 8), free="-x"),
    case("slice", lambda x: x[:, 1:3], n(8, 4), free="x-"),
    case("slice with steps", lambda x: x[::2, ::3], n(8, 4)),
    case("slice all but the last", lambda x: x[:, :-1] - x[:, 1:], n(8, 4), free="x-"),
    case("select", lambda x: x[:, 2], n(8, 4), free="x-"),
    case("select in a split dim", lambda x: (x[3], x[-1]), n(8, 4), free="-x"),
    case("narrow", lambda x: x.narrow(0, 2, 4), n(8, 4), free="-x"),
    case("pad", lambda x: F.pad(x, (1, 2, 0, 3), value=7.0), n(8, 4)),
    case("pad one dim", lambda x: F.pad(x, (1, 3)), n(8, 4), free="x-"),
    case("pad by cropping", lambda x: F.pad(x, (-1, 5)), n(8, 4), free="x-"),
    case("pad circular", lambda x: F.pad(x[None], (1, 1), mode="circular"), n(8, 4)),
    case("pad reflected", lambda x: F.pad(x, (1, 1), mode="reflect"), n(4, 8)),
    case("flip", lambda x: x.flip(0), n(8, 4), free="-x"),
    case("flip both", lambda x: x.flip(0, 1), n(8, 4)),
    case("roll", lambda x: x.roll(1, 0), n(8, 4), free="-x"),
    case("roll both", lambda x: x.roll((3, -1), (0, 1)), n(8, 4)),
    case("roll flat", lambda x: x.roll(5), n(8, 4)),
    case("rot90", lambda x: torch.rot90(x, 1, (0, 1)), n(8, 4)),
    case("tril", torch.tril, n(2, 8, 8), free="each -xy"),
    case("triu", lambda x: x.triu(1), n(8, 8), free="each xy (yx)-"),
    case("triu below", lambda x: x.triu(-2), n(4, 8), free="each"),
    case("diagonal", lambda x: x.diagonal(dim1=1, dim2=2), n(8, 4, 4), free="x--"),
    case("diag of a vector", torch.diag, n(8)),
    case("trace", torch.trace, n(8, 8)),
    case("unfold", lambda x: x.unfold(1, 2, 2), n(8, 4), free="x-"),
    case("causal mask", lambda x: x.masked_fill(torch.ones(8, 8).tril() == 0, -9.0), n(4, 8, 8), free="each"),
    case("mask of aranges", lambda x: x * (torch.arange(8)[:, None] >= torch.arange(4)), n(8, 4), free="each xy"),
    case("positions", lambda x: x + torch.arange(8)[:, None] * torch.linspace(0, 1, 4), n(8, 4), free="each"),
    case("eye", lambda x: x + torch.eye(8), n(8, 8), free="each"),
    case("meshgrid", lambda x: x * torch.stack(torch.meshgrid(torch.arange(8), torch.arange(4), indexing="ij")).sum(0), A),
    case("outer", torch.outer, n(8), n(4), free="x,y x,"),
    case("kron", torch.kron, n(4, 2), n(2, 4)),
    case("broadcast_tensors", lambda x, y: [t * 2 for t in torch.broadcast_tensors(x, y)], n(8, 1), n(4)),
    case("atleast and hstack", lambda x, y: torch.hstack([x, y]), n(8), n(4)),
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), n(4, 8, 2, 2)),
    case("slice write", slice_write, n(8, 4), n(8, 2), free="x-,x-" if False else ""),
    case("in place", in_place, n(8, 4), free="x-"),
    case("in place through views", in_place_views, n(8, 4)),
    case("fill and zero", lambda x: x.clone().fill_(2.0) + x.clone().zero_() + x, n(8, 4), free="each"),
    case("copy into", lambda x, y: torch.empty_like(x).copy_(y) * x, n(8, 4), n(4)),
    case("contiguous and clone", lambda x: x.t().contiguous().clone().t(), n(8, 4), free="each"),
    case("complex views", lambda z: torch.view_as_real(z.transpose(0, 1)).flatten(1), cn(8, 4)),
    case("where of positions", lambda m, x: torch.where(m, x, x.roll(1, 1)), bools(8, 4), n(8, 4), free="x-,x-"),
    case("as_strided by hand", lambda x: x.reshape(2, 4, 4)[:, ::2].permute(1, 0, 2), n(8, 4)),
    case("select_scatter", lambda x, y: torch.select_scatter(x, y, 1, 2), n(8, 4), n(8), free="x-,x"),
    case("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), n(8, 4), n(8, 2), free="x-,x-"),
    case("no rows", lambda x, y: (x * 2, x.sum(0), x @ y, torch.cat([x, y.t()[:, :8]]), x.reshape(8, 0)), n(0, 8), n(8, 8)),
    case("dims of one", lambda x: (x + 1, x.sum(0), x.squeeze(), x.expand(4, 8, 4), x.softmax(2), x.flatten()), n(1, 8, 1)),
    case("twice the same", lambda x: (x, x, x * 2, x.view_as(x), x.t().t()), n(8, 4), free="each"),
    case("unused inputs", lambda x, y, z: y[0] * 2, n(8, 4), n(8, 4), n(4)),
    case("constants", lambda x: (torch.ones(8, 4).double(), torch.arange(8), x * 0), n(8, 4)),
    case("diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y), n(8, 8), n(8)),
]  # fmt: skip
