"""A Llama block as a pure function over a tree of weights: RMSNorm, rotary embedding, grouped heads, SiLU gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F

WIDTH, HEADS, GROUPS, SIZE, HIDDEN, VOCABULARY = 32, 8, 4, 4, 64, 48

MEGATRON = {
    "embed": "(tp v) d",
    "*.[qkv]": "(tp n) d",
    "*.gate": "(tp n) d",
    "*.up": "(tp n) d",
    "*.o": "d (tp n)",
    "*.down": "d (tp n)",
}
ZERO3 = {key: value.replace(" d", " (fsdp d)").replace("d (", "(fsdp d) (") for key, value in MEGATRON.items()}


def weights(layers: int, dtype: torch.dtype = torch.float64) -> dict:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype) / shape[-1] ** 0.5

    def layer() -> dict:
        return {
            "norm1": draw(WIDTH) + 1,
            "q": draw(HEADS * SIZE, WIDTH),
            "k": draw(GROUPS * SIZE, WIDTH),
            "v": draw(GROUPS * SIZE, WIDTH),
            "o": draw(WIDTH, HEADS * SIZE),
            "norm2": draw(WIDTH) + 1,
            "gate": draw(HIDDEN, WIDTH),
            "up": draw(HIDDEN, WIDTH),
            "down": draw(WIDTH, HIDDEN),
        }

    return {"embed": draw(VOCABULARY, WIDTH), "norm": draw(WIDTH) + 1, "layers": [layer() for _ in range(layers)]}


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def angles(length: int, dtype: torch.dtype) -> torch.Tensor:
    rates = 1.0 / 100.0 ** (torch.arange(0, SIZE, 2, dtype=dtype) / SIZE)
    return torch.outer(torch.arange(length, dtype=dtype), rates)


def rotate_real(x):
    """(b, h, t, d): halves turned by the angle of their position, as Hugging Face writes it."""
    turn = torch.cat([angles(x.shape[-2], x.dtype)] * 2, -1)
    first, second = x.chunk(2, -1)
    return x * turn.cos() + torch.cat([-second, first], -1) * turn.sin()


def rotate_complex(x):
    """(b, h, t, d): pairs turned as complex numbers, as Meta writes it."""
    turn = angles(x.shape[-2], x.dtype)
    turn = torch.polar(torch.ones_like(turn), turn)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def spread_interleave(x):
    return torch.repeat_interleave(x, HEADS // GROUPS, dim=1)


def spread_expand(x):
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, HEADS // GROUPS, t, d).reshape(b, HEADS, t, d)


def attention(params, x, rotate, spread):
    q, k, v = ((x @ params[name].T).unflatten(-1, (-1, SIZE)).transpose(1, 2) for name in "qkv")
    q, k = rotate(q), rotate(k)
    y = F.scaled_dot_product_attention(q, spread(k), spread(v), is_causal=True)
    return y.transpose(1, 2).flatten(2) @ params["o"].T


def gated(params, x):
    return (F.silu(x @ params["gate"].T) * (x @ params["up"].T)) @ params["down"].T


def block(params, x, rotate=rotate_real, spread=spread_interleave):
    x = x + attention(params, rms_norm(x, params["norm1"]), rotate, spread)
    return x + gated(params, rms_norm(x, params["norm2"]))


def loss(params, tokens, rotate=rotate_real, spread=spread_interleave):
    """The mean cross-entropy of each token given those before it; the embedding is tied."""
    x = F.embedding(tokens[:, :-1], params["embed"])
    for layer in params["layers"]:
        x = block(layer, x, rotate, spread)
    logits = rms_norm(x, params["norm"]) @ params["embed"].T
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
