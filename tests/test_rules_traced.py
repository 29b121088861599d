"""What users write, traced with its gradient: every op that appears has a rule."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from spmdfn.partition.calls import Calls
from spmdfn.partition.trace import trace

R = torch.randn
CLASSES = torch.tensor([1, 0, 2, 3])
QKV = (R(2, 4, 8, 16), R(2, 4, 8, 16), R(2, 4, 8, 16))


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def gelu_mlp(x, up, bias, down):
    return F.linear(F.gelu(F.linear(x, up, bias)), down)


def conv_net(x, w1, b1, scale, shift, mean, var, w2):
    mean, var = mean.detach().clone(), var.detach().abs()
    y = F.batch_norm(F.conv2d(x, w1, b1, padding=1), mean, var, scale, shift, training=True)
    y = F.max_pool2d(F.relu(y), 2)
    return F.adaptive_avg_pool2d(F.conv2d(y, w2, stride=2), 1).flatten(1)


def normalised(x, w, b):
    return F.layer_norm(x, (8,), w, b) + F.rms_norm(x, (8,), w) + F.group_norm(x.mT, 2, w, b).mT


def statistics(x):
    var, mean = torch.var_mean(x, 1)
    return x.var(), x.std(0), var, mean, x.mean(), x.sum(1), x.norm(), x.norm(p=1, dim=1), x.norm(p=3, dim=0)


def extrema(x):
    return x.amax(1), x.amin(), x.max(), x.max(1).values, x.min(0).values, x.cummax(1).values, torch.aminmax(x, dim=1)


def scans(x):
    return x.cumsum(1), x.cumprod(0), x.logcumsumexp(1), x.prod(), x.prod(1), x.logsumexp(0), x.nansum(1), x.nanmean()


def matmuls(x, y, v):
    return (
        x @ y,
        x @ v,
        v @ y,
        x[0] @ y,
        torch.dot(v, v),
        torch.outer(v, v),
        torch.einsum("bij,jk->bik", x, y),
        x @ x.mT,
    )


SNIPPETS = {
    "layer_norm, rms_norm, group_norm": (normalised, R(2, 4, 8), R(8), R(8)),
    "layer_norm of two dims": (lambda x: F.layer_norm(x, (4, 8)), R(2, 4, 8)),
    "instance_norm": (lambda x: F.instance_norm(x), R(2, 4, 3, 3)),
    "batch_norm in evaluation": (
        lambda x, w, m: F.batch_norm(x, m.detach(), m.detach().abs(), w, w), R(2, 4, 3, 3), R(4), R(4)
    ),
    "sdpa": (sdpa, *QKV),
    "sdpa, causal": (lambda *qkv: sdpa(*qkv, is_causal=True), *QKV),
    "sdpa, odd": (lambda *qkv: sdpa(*qkv, is_causal=True), R(2, 3, 5, 7), R(2, 3, 5, 7), R(2, 3, 5, 7)),
    "sdpa, masked": (lambda *qkv: sdpa(*qkv, attn_mask=torch.ones(2, 1, 8, 8).tril().bool()), *QKV),
    "sdpa, trained bias": (lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *QKV, R(8, 8)),
    "sdpa, three dims": (sdpa, R(4, 8, 16), R(4, 8, 16), R(4, 8, 16)),
    "sdpa, grouped heads": (
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True, is_causal=True), R(2, 4, 8, 16), R(2, 2, 8, 16), R(2, 2, 8, 16)
    ),
    "gelu mlp": (gelu_mlp, R(2, 4, 8), R(16, 8), R(16), R(8, 16)),
    "bilinear": (F.bilinear, R(4, 3), R(4, 5), R(6, 3, 5)),
    "matmuls": (matmuls, R(2, 8, 8), R(8, 8), R(8)),
    "fused products": (
        lambda b, x, y: (torch.addmm(b, x, y), torch.baddbmm(b, x[None], y[None]), torch.addmv(b[0], x, y[0])),
        R(4, 4), R(4, 4), R(4, 4)
    ),
    "distances": (lambda x, y: (torch.cdist(x, y), F.pairwise_distance(x, y), torch.dist(x, y)), R(4, 8), R(4, 8)),
    "cosine_similarity": (lambda x, y: (F.cosine_similarity(x, y), F.normalize(x)), R(4, 8), R(4, 8)),
    "cross_entropy": (lambda x: F.cross_entropy(x, CLASSES), R(4, 8)),
    "cross_entropy, all options": (
        lambda x, w: F.cross_entropy(x, CLASSES, w.detach(), label_smoothing=0.1, ignore_index=2), R(4, 8), R(8)
    ),
    "cross_entropy, probabilities": (lambda x, t: F.cross_entropy(x, t), R(4, 8), R(4, 8)),
    "cross_entropy of images": (lambda x: F.cross_entropy(x, torch.zeros(2, 4, 3).long()), R(2, 8, 4, 3)),
    "softmax": (lambda x: (x.softmax(1), x.log_softmax(0), F.softmin(x, 1)), R(4, 8)),
    "losses of pairs": (
        lambda x, y: (F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y)), R(4, 8), R(4, 8)
    ),
    "losses of probabilities": (
        lambda x, y: (
            F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), F.binary_cross_entropy_with_logits(x, y.sigmoid()),
            F.kl_div(x, y.softmax(1)), F.poisson_nll_loss(x, y),
        ), R(4, 8), R(4, 8)
    ),
    "losses of margins": (
        lambda x, y: (
            F.hinge_embedding_loss(x, y), F.multi_margin_loss(x, CLASSES), F.soft_margin_loss(x, y.detach().sign()),
            F.triplet_margin_loss(x, y, y + 1), F.multilabel_margin_loss(x, CLASSES[:, None].expand(4, 8)),
        ), R(4, 8), R(4, 8)
    ),
    "statistics": (statistics, R(4, 8)),
    "extrema": (extrema, R(4, 8)),
    "scans": (scans, R(4, 8)),
    "conv net": (conv_net, R(4, 3, 8, 8), R(4, 3, 3, 3), R(4), R(4), R(4), R(4), R(4), R(8, 4, 2, 2)),
    "depthwise and 1d": (
        lambda x, w, u: (F.conv2d(x, w, groups=4), F.conv1d(x[0], u, padding="same")),
        R(2, 4, 8, 8), R(8, 1, 3, 3), R(4, 8, 3)
    ),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), R(2, 4, 8, 8), R(4, 6, 3, 3)),
    "pools": (
        lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 3)),
        R(2, 4, 8, 8)
    ),
    "pools of lines": (lambda x: (F.max_pool1d(x, 2), F.avg_pool1d(x, 2), F.adaptive_avg_pool1d(x, 3)), R(2, 4, 8)),
    "local_response_norm, lp_pool": (lambda x: (F.local_response_norm(x, 2), F.lp_pool2d(x, 2, 2)), R(2, 4, 8, 8)),
    "resizing": (
        lambda x: [F.interpolate(x, scale_factor=2, mode=mode) for mode in ("nearest", "bilinear", "bicubic")],
        R(2, 4, 8, 8)
    ),
    "padding": (
        lambda x: [F.pad(x, (1, 1, 1, 1), mode=mode) for mode in ("constant", "reflect", "replicate")], R(2, 4, 8, 8)
    ),
    "patches": (lambda x: F.fold(F.unfold(x, 2), (8, 8), 2), R(2, 4, 8, 8)),
    "shuffles": (lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)), R(2, 4, 8, 8)),
    "grid_sample": (F.grid_sample, R(2, 4, 8, 8), R(2, 3, 3, 2)),
}  # fmt: skip


def total(value):
    """A number that depends on every tensor in a nested value, not linearly."""
    if isinstance(value, torch.Tensor):
        return value.square().sum()
    return sum(total(item) for item in value)


@pytest.mark.parametrize("name", SNIPPETS)
def test_every_op_has_a_rule(name):
    function, *inputs = SNIPPETS[name]
    places = tuple(range(len(inputs)))

    def gradients(*args):
        return list(torch.func.grad(lambda *inner: total(function(*inner)), places)(*args))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # losses warn of their defaults
        traced = trace(gradients, inputs, names=[str(place) for place in places])
    calls = Calls()
    nodes = [node for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert {str(node.target) for node in nodes if calls(node).rule is None} == set()
