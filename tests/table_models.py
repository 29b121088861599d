"""The table's models: blocks of GPT and Llama, an MLP, a small conv net, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from laid_out import ints, n, pos, unit
from versus import case

MANY = 4


def mlp(x, up, a, down, b):
    return F.linear(torch.tanh(F.linear(x, up, a)), down, b)


def gpt(tokens, targets, embed, norm, qkv, out, up, down):
    x = F.embedding(tokens, embed) + torch.arange(4).sin()[:, None]
    h = F.layer_norm(x, (8,), norm)
    q, k, v = (t.unflatten(-1, (4, 2)).transpose(1, 2) for t in (h @ qkv).split(8, -1))
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ out
    x = x + F.gelu(F.layer_norm(x, (8,), norm) @ up) @ down
    return F.cross_entropy((F.layer_norm(x, (8,), norm) @ embed.t()).flatten(0, 1), targets.flatten())


def rotary(x):
    angle = torch.arange(x.shape[1])[:, None] * 100 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1]).double()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotary_complex(x):
    angle = torch.arange(x.shape[1])[:, None] * 100 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1]).double()
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def llama(turn, share):
    def block(x, norm, wq, wk, wv, wo, *ffn):
        h = F.rms_norm(x, (8,), norm)
        q = turn((h @ wq).unflatten(-1, (4, 4)))
        k, v = turn((h @ wk).unflatten(-1, (2, 4))), (h @ wv).unflatten(-1, (2, 4))
        k, v = share(k), share(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.mT / 2).masked_fill(torch.ones(4, 4).tril() == 0, float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ wo
        if not ffn:
            return x
        gate, up, down = ffn
        h = F.rms_norm(x, (8,), norm)
        return x + (F.silu(h @ gate) * (h @ up)) @ down

    return block


def conv_net(x, w, b, scale, shift, mean, var, v, head):
    mean, var = mean.clone(), var.clone()
    y = F.relu(F.batch_norm(F.conv2d(x, w, b, padding=1), mean, var, scale, shift, training=True))
    y = F.avg_pool2d(F.conv2d(F.max_pool2d(y, 2), v, padding=1), 2)
    return F.adaptive_avg_pool2d(y, 1).flatten(1) @ head, mean, var


def expand_heads(t):
    return t[:, :, :, None].expand(*t.shape[:3], 2, t.shape[-1]).flatten(2, 3)


LLAMA = (n(4, 4, 8), n(8), unit(8, 16), unit(8, 8), unit(8, 8), unit(16, 8))
GATE = (unit(8, 16), unit(8, 16), unit(16, 8))

MODELS = [
    case("mlp", mlp, n(4, 4, 8), unit(16, 8), n(16), unit(8, 16), n(8), free="x--,,,, -x-,,,, xy-,,,,", samples=MANY),
    case("gpt", gpt, ints(16, 4, 4), ints(16, 4, 4), n(16, 8), n(8), unit(8, 24), unit(8, 8), unit(8, 16), unit(16, 8),
         close=1e-6, samples=MANY),
    case("rotary", rotary, n(4, 4, 4, 8), free="x--- -x-- --x- xy-- x-y-"),
    case("rotary, complex", rotary_complex, n(4, 4, 4, 8), free="x--- -x-- --x- xy-- x-y- ---x"),
    case("llama", llama(rotary, lambda t: t.repeat_interleave(2, 2)), *LLAMA, *GATE, free="x--,,,,,,,,", samples=MANY),
    case("llama, complex", llama(rotary_complex, expand_heads), *LLAMA, free="x--,,,,,", samples=MANY),
    case("conv net", conv_net, n(4, 4, 8, 8), unit(4, 4, 3, 3), n(4), n(4), n(4), n(4), pos(4), unit(8, 4, 3, 3),
         unit(8, 4), diff=(0, 1, 2, 3, 4, 7, 8), samples=MANY),
]  # fmt: skip
