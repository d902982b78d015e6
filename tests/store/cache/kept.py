"""A backend whose passes are slow in name only, and that may be kept: what it does is counted."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile

import foregrad
from foregrad._torch.graphs import copied, make_graph_module
from foregrad.backends.eager import eager_compiler
from foregrad.store.cache.store import Store

PREPARED = []  # the joint graphs that the passes were asked for


def prepare(module):
    """Every `sin` twice: the results tell whether the passes were there."""
    PREPARED.append(module)
    copy = make_graph_module(module, copied(module.graph), "GraphModule")
    for node in list(copy.graph.nodes):
        if "aten.sin" in str(node.target):
            with copy.graph.inserting_after(node):
                again = copy.graph.call_function(node.target, (node.args[0],))
                again.meta = node.meta.copy()
            node.replace_all_uses_with(again)
    return copy


def register(name="kept", key=None):
    return foregrad.register_backend(
        name,
        eager_compiler,
        cache_key=lambda: key or {"kept": 1},
        prepare_joint=prepare,
        partition="default",
        replace=True,
    )


@contextlib.contextmanager
def fresh_cache(**settings):
    """Context: an empty cache of its own; gives its folder."""
    with tempfile.TemporaryDirectory() as parent:
        folder = os.path.join(parent, "cache")
        with foregrad.config.override(cache=True, cache_dir=folder, **settings):
            yield pathlib.Path(folder)


def keys_in(folder, what="halves"):
    return {entry.key for entry in Store(str(folder), 1 << 20).entries() if entry.about["what"].startswith(what)}
