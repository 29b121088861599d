"""The table's look-ups: embedding, gather, scatter, indices that are tensors."""

# ruff: noqa: E501 (one line a case)
from __future__ import annotations

import torch
import torch.nn.functional as F
from laid_out import bools, distinct, ints, n
from versus import case

IDS = ints(8, 4, 4)
ROWS = torch.tensor([2, 2, 1, 0])


def write_at(x, ids, y):
    x = x.clone()
    x[ids] = y
    return x


def add_at(x, ids, y):
    return x.index_put((ids,), y, accumulate=True)


def masked(x, m):
    x = x.clone()
    x[m] = 3.0
    return x


SELECT = [
    case("embedding", F.embedding, IDS, n(8, 4), free="x-, -x, ,-x x-,-y"),
    case("embedding with padding", lambda i, w: F.embedding(i, w, padding_idx=3), IDS, n(8, 4), free="x-, ,-x"),
    case("embedding of one", lambda i, w: F.embedding(i, w), torch.tensor(5), n(8, 4), free=",-x"),
    case("embedding, tied", lambda i, w: F.embedding(i, w) @ w.t(), IDS, n(8, 4)),
    case("one_hot", lambda i: F.one_hot(i, 8), IDS, free="x- -y xy"),
    case("one_hot times a table", lambda i, w: F.one_hot(i, 8).double() @ w, IDS, n(8, 4)),
    case("gather", lambda x, i: x.gather(1, i), n(8, 4), ints(4, 8, 3), free="x-,x-"),
    case("gather of rows", lambda x, i: x.gather(0, i), n(8, 4), ints(8, 4, 4), free="-x,-x"),
    case("gather of fewer rows", lambda x, i: x.gather(1, i), n(8, 4), ints(4, 4, 2)),
    case("gather of losses", lambda x, i: x.log_softmax(-1).gather(-1, i[:, None])[:, 0], n(4, 8), ints(8, 4), free="x-,x"),
    case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), n(8, 4), ints(4, 8, 2)),
    case("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), n(8, 4), ints(4, 8, 3), n(8, 3), free="x-,x-,x-"),
    case("scatter_add of rows", lambda x, i, y: x.scatter_add(0, i, y), n(8, 4), ints(8, 4, 4), n(4, 4)),
    case("scatter", lambda x, i, y: x.scatter(1, i, y), n(8, 4), distinct(8, 4).argsort(1)[:, :2], n(8, 2)),
    case("scatter a value", lambda x, i: x.scatter(1, i, 5.0), n(8, 4), ints(4, 8, 2)),
    case("scatter_reduce", lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), n(8, 4), ints(8, 4, 4), distinct(4, 4)),
    case("index_select", lambda x, i: x.index_select(0, i), n(8, 4), ROWS, free="-x, ,x"),
    case("index_select of dim 1", lambda x, i: x.index_select(1, i), n(8, 4), ROWS, free="x-,"),
    case("index_add", lambda x, i, y: x.index_add(0, i, y), n(8, 4), ROWS, n(4, 4), free="-x,,-x"),
    case("index_copy", lambda x, i, y: x.index_copy(0, i, y), n(8, 4), torch.tensor([6, 0, 3, 1]), n(4, 4)),
    case("index_fill", lambda x, i: x.index_fill(0, i, 2.0), n(8, 4), ROWS),
    case("x[i]", lambda x, i: x[i], n(8, 4), IDS, free="-x, ,x- ,-y"),
    case("x[:, i]", lambda x, i: x[:, i], n(8, 4), ints(4, 4), free="x-, ,x"),
    case("x[i, j]", lambda x, i, j: x[i, j], n(8, 4), ints(8, 4), ints(4, 4), free=",x,x"),
    case("x[i, :, j]", lambda x, i, j: x[i, :, j], n(4, 8, 4), ints(4, 4), ints(4, 4)),
    case("x[i[:, None], j]", lambda x, i, j: x[i[:, None], j], n(8, 4), ints(8, 4), ints(4, 4)),
    case("x[arange, i]", lambda x, i: x[torch.arange(8), i], n(8, 4), ints(4, 8)),
    case("indices of int32", lambda x, i: (x[i.int()], F.embedding(i.int(), x)), n(8, 4), ints(8, 4)),
    case("negative indices", lambda x, i: x[i], n(8, 4), ints(8, 4, low=-8)),
    case("index write", write_at, n(8, 4), torch.tensor([6, 0, 3, 1]), n(4, 4)),
    case("index add", add_at, n(8, 4), ROWS, n(4, 4)),
    case("index write of a scalar", lambda x, i: x.index_put((i,), torch.tensor(2.0).double()), n(8, 4), ROWS),
    case("masked write", masked, n(8, 4), bools(8, 4), free="each"),
    case("kv cache", lambda c, p, y: c.index_copy(1, p, y).sum(1), n(2, 8, 4), torch.tensor([3]), n(2, 1, 4)),
    case("searchsorted", torch.searchsorted, torch.arange(8.0).double(), n(4, 4) * 4, free=",x-"),
    case("bucketize", lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]).double()), n(8, 4), free="each"),
    case("bincount by one_hot", lambda i: F.one_hot(i.flatten(), 8).sum(0), IDS),
    case("accuracy", lambda x, t: (x.argmax(-1) == t).double().mean(), n(8, 4), ints(4, 8)),
    case("cross_entropy", F.cross_entropy, n(8, 4), ints(4, 8)),
    case("cross_entropy with weights", F.cross_entropy, n(8, 4), ints(4, 8), n(4).abs(), diff=(0,)),
    case("cross_entropy, ignoring", lambda x, t: F.cross_entropy(x, t, ignore_index=2), n(8, 4), ints(4, 8)),
    case("cross_entropy, smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), n(8, 4), ints(4, 8)),
    case("cross_entropy of each", lambda x, t: F.cross_entropy(x, t, reduction="none"), n(8, 4), ints(4, 8), free="x-,x"),
    case("cross_entropy of a sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), n(8, 4), ints(4, 8)),
    case("cross_entropy of probabilities", lambda x, y: F.cross_entropy(x, y.softmax(1)), n(8, 4), n(8, 4)),
    case("cross_entropy of images", F.cross_entropy, n(2, 4, 4, 2), ints(4, 2, 4, 2)),
    case("nll_loss", lambda x, t: F.nll_loss(x.log_softmax(1), t), n(8, 4), ints(4, 8)),
    case("kl_div", lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), n(8, 4), n(8, 4)),
]  # fmt: skip
