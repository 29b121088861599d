"""Looking into what was compiled: `explain` lists the collectives of a function, `memory` its peak per device."""

from .explain import Explanation, explain
from .memory import Peak, peak_memory

__all__ = ["Explanation", "Peak", "explain", "peak_memory"]
