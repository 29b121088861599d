"""Settings that every test runs under."""

from __future__ import annotations

import warnings

import torch

# Two pytest workers share the cores; more threads only make them wait for each other.
torch.set_num_threads(1)

# The first jvp loads what torch keeps for it, which warns of its own use of torch.jit.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.func.jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))
