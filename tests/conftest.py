"""Settings that every test runs under."""

from __future__ import annotations

import torch

# Two pytest workers share the cores; more threads only make them wait for each other.
torch.set_num_threads(1)
