"""A byte-level GPT as pure functions over a tree of parameters. Nothing here knows how many devices there are.

The functions see whole tensors. Where each one lives is said once, in `LAYOUT` and in three patterns for activations.

In comments and patterns: b sequences, t positions, d the width of the model, h heads, v the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import spmdfn as sp

Params = dict[str, Any]

# The mesh: dp splits the batch, fsdp the batch and the stored weights (ZeRO-3), tp each matmul (Megatron).
AXES = ("dp", "fsdp", "tp")

# Weights are (out, in), as F.linear takes them. Column weights split their outputs over tp, row weights their inputs,
# so a pair of them needs one sum over tp. A weight that no rule names (the norms) is whole on every device.
LAYOUT = {
    "embed.weight": "(tp v) (fsdp d)",
    "position.weight": "t (fsdp d)",
    "*.q.weight": "(tp n) (fsdp d)",
    "*.k.weight": "(tp n) (fsdp d)",
    "*.v.weight": "(tp n) (fsdp d)",
    "*.out.weight": "(fsdp d) (tp n)",
    "*.up.weight": "(tp n) (fsdp d)",
    "*.down.weight": "(fsdp d) (tp n)",
}
TOKENS = "(dp fsdp b) t"
ACTIVATIONS = "(dp fsdp b) t d"
SEQUENCE_PARALLEL = "(dp fsdp b) (tp t) d"


@dataclass(frozen=True)
class Config:
    """The sizes of the model; the defaults make about a million parameters."""

    layers: int = 5
    width: int = 128
    heads: int = 8
    context: int = 64
    vocabulary: int = 256
    dropout: float = 0.1
    sequence_parallel: bool = False


# ---------------------------------------------------------------- parameters


def shapes(config: Config) -> Params:
    """The tree of the parameters as meta tensors: names, shapes and dtypes, but no numbers."""

    def weight(*shape: int) -> Params:
        return {"weight": torch.empty(shape, device="meta")}

    d = config.width
    layer = {
        "norm1": weight(d),
        "attention": {"q": weight(d, d), "k": weight(d, d), "v": weight(d, d), "out": weight(d, d)},
        "norm2": weight(d),
        "mlp": {"up": weight(4 * d, d), "down": weight(d, 4 * d)},
    }
    return {
        "embed": weight(config.vocabulary, d),
        "position": weight(config.context, d),
        "layers": [layer] * config.layers,
        "norm": weight(d),
    }


def init(key: Tensor, config: Config) -> Params:
    """Draw the parameters: norms are one, matrices normal, those that write to the residual smaller with depth."""
    leaves, treedef = optree.tree_flatten(shapes(config))
    drawn = []
    for i, (path, leaf) in enumerate(zip(treedef.paths(), leaves, strict=True)):
        if leaf.ndim == 1:
            drawn.append(torch.ones(leaf.shape))
        else:
            scale = 0.02 / math.sqrt(2 * config.layers) if path[-2] in ("out", "down") else 0.02
            drawn.append(scale * sp.random.normal(sp.random.fold_in(key, i), tuple(leaf.shape)))
    return optree.tree_unflatten(treedef, drawn)


# ---------------------------------------------------------------- the model


def forward(params: Params, tokens: Tensor, config: Config, key: Tensor | None = None) -> Tensor:
    """The logits, (b, t, v), of the byte after each of `tokens`, (b, t); with a key, under dropout."""
    x = F.embedding(tokens, params["embed"]["weight"]) + params["position"]["weight"][: tokens.shape[1]]
    x = _between(x, config)
    for layer, layer_key in zip(params["layers"], _subkeys(key, config.layers), strict=True):
        key1, key2 = _subkeys(layer_key, 2)
        y = attention(layer["attention"], _norm(layer["norm1"], x, config), config)
        x = _between(x + dropout(y, config.dropout, key1), config)
        y = mlp(layer["mlp"], _norm(layer["norm2"], x, config))
        x = _between(x + dropout(y, config.dropout, key2), config)
    return F.linear(_norm(params["norm"], x, config), params["embed"]["weight"])


def loss(params: Params, tokens: Tensor, config: Config, key: Tensor | None = None) -> Tensor:
    """The mean cross-entropy, in nats a byte, of each of `tokens`, (b, t + 1), given those before it."""
    logits = forward(params, tokens[:, :-1], config, key)
    return F.cross_entropy(rearrange(logits, "b t v -> (b t) v"), rearrange(tokens[:, 1:], "b t -> (b t)"))


def attention(params: Params, x: Tensor, config: Config) -> Tensor:
    """Causal self-attention. Separate q, k and v keep every head on one device: one fused (3 h d) weight would not."""
    q, k, v = (rearrange(F.linear(x, params[name]["weight"]), "b t (h d) -> b h t d", h=config.heads) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(rearrange(y, "b h t d -> b t (h d)"), params["out"]["weight"])


def mlp(params: Params, x: Tensor) -> Tensor:
    """Two linear maps around a GELU, four times as wide between them."""
    return F.linear(F.gelu(F.linear(x, params["up"]["weight"])), params["down"]["weight"])


def dropout(x: Tensor, rate: float, key: Tensor | None) -> Tensor:
    """Zero a fraction `rate` of x, by the key alone: the same elements on any mesh. Without a key, x itself."""
    if key is None or rate == 0:
        return x
    return x * sp.random.bernoulli(key, 1 - rate, tuple(x.shape)) / (1 - rate)


def _norm(params: Params, x: Tensor, config: Config) -> Tensor:
    x = F.layer_norm(x, (config.width,), params["weight"])
    return sp.constrain(x, ACTIVATIONS) if config.sequence_parallel else x


def _between(x: Tensor, config: Config) -> Tensor:
    """The residual between matmuls, whose positions sequence parallelism splits over tp."""
    return sp.constrain(x, SEQUENCE_PARALLEL) if config.sequence_parallel else x


def _subkeys(key: Tensor | None, n: int) -> list[Tensor | None]:
    return [None if key is None else sp.random.fold_in(key, i) for i in range(n)]
