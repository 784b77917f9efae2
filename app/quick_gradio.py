"""Gradio, imported in half of its time and without its call home. Before anything else imports it.

As it is imported, Gradio parses the source of each of its components and writes a type stub beside it, for editors. A
component whose source file cannot be told is left out of that, so that is what it hears of its own. And importing makes
objects by the hundred thousand without leaving garbage to look for among them.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    file_of = inspect.getfile
    collects = gc.isenabled()

    def getfile(thing: Any) -> str:
        if isinstance(thing, type) and thing.__module__.startswith("gradio."):
            raise OSError("no stub is wanted")
        return file_of(thing)

    inspect.getfile = getfile
    gc.disable()
    try:
        yield
    finally:
        inspect.getfile = file_of
        if collects:
            gc.enable()


os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
with hurried():
    import gradio

__all__ = ["gradio"]
