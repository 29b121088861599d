"""A mixture of experts, routed: tokens travel to the devices of their experts, and come back.

Tokens are split over the axis "ep", and so are the experts. Each token picks its k best experts; its result is their
outputs weighted by the router's probabilities. Two ways to bring tokens to experts, and back by the same road:

`with_capacity` packs, on each device, a buffer with `capacity` slots for every expert, and `sp.all_to_all` hands each
device the slots of its experts. All sizes are fixed, which is what fast hardware wants, but a token that finds its
expert's slots taken is dropped: the expert adds nothing to it. Which tokens those are depends on the device's other
tokens; so the function of one device that this equals, `one_device`, counts in as many groups as there are devices.

`dropless` drops nothing. Each device sorts its tokens by expert, devices tell each other how many rows to expect, and
`sp.ragged_all_to_all` moves just those rows. The counts are data: the collective reads them on the host at each call.
Memory must not depend on data, for a program is traced once: the receiving buffer has room for the worst case, all
tokens to one device. Within it everything may be computed: counts and offsets come out of the router, and this works in
`spmd_jit` as it does op by op. (`sp.explain` counts the bytes of whole buffers, for it knows no counts.)

Run it: `python examples/moe.py`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import spmdfn as sp
from spmdfn import P

# Suffixes of names are shapes: N tokens (of a device), K choices of a token, D features, H hidden features, E experts,
# e experts of one device, C slots of an expert (from one device; from all of them: C'), R rows, S devices that send.
Params = dict[str, Tensor]
PARAMS = {"router_DE": P(), "up_EDH": "(ep e) d h", "down_EHD": "(ep e) h d"}
TOKENS = "(ep n) d"


def init(key: Tensor, d: int, h: int, e: int, dtype: torch.dtype = torch.float32) -> Params:
    router, up, down = sp.random.split(key, 3)
    return {
        "router_DE": sp.random.normal(router, (d, e), dtype) / d**0.5,
        "up_EDH": sp.random.normal(up, (e, d, h), dtype) / d**0.5,
        "down_EHD": sp.random.normal(down, (e, h, d), dtype) / h**0.5,
    }


def route(params: Params, x_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """For each token the numbers of its k best experts, and their weights."""
    gates_NK, expert_NK = torch.softmax(x_ND @ params["router_DE"], -1).topk(k)
    return gates_NK, expert_NK


def experts(params: Params, x_ECD: Tensor) -> Tensor:
    """Every expert on its own rows."""
    return torch.relu(x_ECD @ params["up_EDH"]) @ params["down_EHD"]


def with_capacity(params: Params, x_ND: Tensor, *, k: int, capacity: int, send: Callable, back: Callable) -> Tensor:
    """Routed experts by slots; `send` and `back` move a buffer to the experts' devices and home again."""
    gates_NK, expert_NK = route(params, x_ND, k)
    chosen_RE = F.one_hot(expert_NK.flatten(), params["router_DE"].shape[1])
    slot_R = ((chosen_RE.cumsum(0) - 1) * chosen_RE).sum(1)  # earlier tokens that chose the same expert
    inside_RC = (slot_R[:, None] == torch.arange(capacity)).to(x_ND.dtype)  # all zeros: dropped
    place_NKEC = torch.einsum("re,rc->rec", chosen_RE.to(x_ND.dtype), inside_RC).unflatten(0, expert_NK.shape)

    slots_ECD = torch.einsum("nkec,nd->ecd", place_NKEC, x_ND)
    out_ECD = back(experts(params, send(slots_ECD)))
    return torch.einsum("nkec,nk,ecd->nd", place_NKEC, gates_NK, out_ECD)


def one_device(params: Params, x_ND: Tensor, *, k: int, capacity: int, groups: int) -> Tensor:
    """The same without a mesh, tokens in `groups`; a capacity of all tokens drops none."""
    alone = partial(with_capacity, k=k, capacity=capacity, send=lambda x: x, back=lambda x: x)
    return torch.vmap(alone, (None, 0))(params, x_ND.unflatten(0, (groups, -1))).flatten(0, 1)


def dropless(params: Params, x_ND: Tensor, *, k: int) -> Tensor:
    """Routed experts, each row sent as it is: the body of a map over "ep"."""
    size, here = sp.axis_size("ep"), sp.axis_index("ep")
    gates_NK, expert_NK = route(params, x_ND, k)
    order_R = expert_NK.flatten().argsort(stable=True)  # by expert, so by device
    rows_RD, expert_R = x_ND[order_R // k], expert_NK.flatten()[order_R]

    own = params["up_EDH"].shape[0]
    counts_S = F.one_hot(expert_R // own, size).sum(0)  # rows for each device
    counts_SS = sp.all_gather(counts_S, "ep")  # [from, to]
    before_SS, landed_SS = counts_SS.cumsum(1) - counts_SS, counts_SS.cumsum(0) - counts_SS
    there = (before_SS[here], counts_SS[here], landed_SS[here], counts_SS[:, here])
    home = (landed_SS[:, here], counts_SS[:, here], before_SS[:, here], counts_SS[here])

    room = size * rows_RD.shape[0]  # the worst case: every row of every device
    received_RD = sp.ragged_all_to_all(rows_RD, x_ND.new_zeros(room, x_ND.shape[1]), *there, axis_name="ep")
    whose_R = sp.ragged_all_to_all(expert_R, expert_R.new_full((room,), -1), *there, axis_name="ep")
    chosen_ER = (whose_R - here * own) == torch.arange(own)[:, None]
    out_RD = torch.where(chosen_ER[..., None], experts(params, received_RD.expand(own, -1, -1)), 0).sum(0)
    returned_RD = sp.ragged_all_to_all(out_RD, torch.zeros_like(rows_RD), *home, axis_name="ep")

    weighted_RD = returned_RD * gates_NK.flatten()[order_R, None]
    return torch.zeros_like(x_ND).index_add(0, order_R // k, weighted_RD)


def make(mesh: sp.Mesh, *, k: int, capacity: int | None = None) -> Callable[[Params, Tensor], Tensor]:
    """(params, tokens) -> tokens, over whole tensors; without a capacity no token is dropped."""
    send = partial(sp.all_to_all, axis_name="ep", split_dim=0, concat_dim=1, tiled=True)
    back = partial(sp.all_to_all, axis_name="ep", split_dim=1, concat_dim=0, tiled=True)
    body = dropless if capacity is None else partial(with_capacity, capacity=capacity, send=send, back=back)
    return sp.shard_map(partial(body, k=k), mesh=mesh, in_specs=(PARAMS, TOKENS), out_specs=TOKENS)


def main() -> None:
    mesh = sp.make_mesh((4,), ("ep",))
    params = init(sp.random.key(0), 8, 16, 8)
    x_ND = sp.random.normal(sp.random.key(1), (32, 8))
    for name, capacity in (("capacity 4", 4), ("dropless", None)):
        expected = one_device(params, x_ND, k=2, capacity=capacity or 64, groups=4)
        found = sp.spmd_jit(make(mesh, k=2, capacity=capacity), mesh=mesh, in_specs=(PARAMS, TOKENS))
        print(f"\n{name}:")
        sp.explain(found)(params, x_ND)
        print(
            f"largest difference from one device: {float((found(params, x_ND).unshard() - expected).abs().max()):.1e}"
        )


if __name__ == "__main__":
    main()
