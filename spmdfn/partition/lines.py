"""Which line of the user's source a traced op comes from, in the forward and in the backward."""

from __future__ import annotations

import linecache
import os
import sys
from functools import lru_cache
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import Any

from .._compat import autograd_node, next_sequence_number

_ENGINE = "_engine_run_backward"


def _directory(package: str) -> str:
    spec = find_spec(package)
    return os.path.dirname(spec.origin) + os.sep if spec and spec.origin else package


_LIBRARIES = (*(_directory(package) for package in ("torch", "spmdfn", "optree", "einops", "importlib")), "<")
# Of code without a file only what was typed is the user's: in Python, IPython, a doctest. The rest was generated.
_TYPED = ("<stdin>", "<input>", "<python-input", "<ipython-input", "<doctest ")


@lru_cache(maxsize=4096)
def _shown(filename: str) -> str | None:
    """The file's name as shown to the user; None for a library's file."""
    if filename.startswith(_TYPED):
        return filename
    if filename.startswith(_LIBRARIES) or os.path.basename(filename) == "contextlib.py":
        return None
    relative = os.path.relpath(filename)
    return relative if len(relative) < len(filename) else filename


def user_line(frame: FrameType | None) -> str | None:
    """The nearest line of the user's at or above a frame, as "file.py:123"; None when a backward engine comes first."""
    while frame is not None:
        code = frame.f_code
        name = _shown(code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        if code.co_name == _ENGINE:
            return None
        frame = frame.f_back
    return None


def raising_line(traceback: TracebackType | None) -> str | None:
    """The innermost line of the user's that an exception passed through."""
    found = None
    while traceback is not None:
        name = _shown(traceback.tb_frame.f_code.co_filename)
        if name is not None:
            found = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def quoted(where: str) -> str:
    """A place together with its source text, for an error message.

    >>> quoted("nowhere.py:1")
    'nowhere.py:1'
    """
    name, _, number = where.rpartition(":")
    text = linecache.getline(name, int(number)).strip() if number.isdigit() else ""
    return f"{where}  `{text}`" if text else where


class Lines:
    """Knows the user's line of the op that is being traced.

    Autograd numbers its nodes as it makes them, so the nodes made between two looks at the counter belong to the line
    that ran between them. A backward op then asks the node that runs for its number, and gets its forward line.
    """

    def __init__(self) -> None:
        _shown.cache_clear()  # names are relative to a directory that may have changed
        self._seen = next_sequence_number()
        self._forward: dict[int, str] = {}

    def place(self) -> str:
        """The user's line that runs, without looking at the counter."""
        return self._line(autograd_node(), sys._getframe(2))

    def here(self) -> tuple[str, bool]:
        """The line of the op being dispatched, and whether it runs in a backward.

        Python code that a backward runs (a Function of the user's, a recomputation) has lines of its own.
        """
        node = autograd_node()
        where = self._line(node, sys._getframe(2))
        self._note(where)
        return where, node is not None

    def called(self) -> None:
        """A torch function returned: the nodes made after its last op (by writes to views) are its own."""
        if next_sequence_number() != self._seen:
            self._note(self._line(autograd_node(), sys._getframe(2)))

    def _line(self, node: Any, frame: FrameType) -> str:
        where = user_line(frame)
        if where is None:
            where = self._forward.get(node._sequence_nr(), "") if node is not None else ""
        return where

    def _note(self, where: str) -> None:
        now = next_sequence_number()
        for number in range(self._seen, now):
            self._forward[number] = where
        self._seen = now
