"""Successors: a graph runs on eager's kernels while a second process compiles it; then Inductor's takes its place.

The change comes between two calls, once the caches on disk have all parts. A call that ran on eager's kernels keeps its
own backward. Random numbers stay eager's, so they do not depend on the moment of the change.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from ...annexes import given
from ...backends.registry import Backend, get_backend
from ...config import config
from ...dispatch.graphs import Specialization
from ...dispatch.pipeline import Pipeline, kept_for_derivatives
from ...graph.joint import JointGraph
from ...locks import make_lock
from ...partitioners import default_partition, fused_partition
from ...phases import compiling, say
from ...tracing.derivatives.resumable_trace import ResumableTrace
from ..cache.describe import digest
from ..cache.keeper import Keeper, keeper_for
from .job import PARTITIONS, StaysError, circumstances, graph_as_data, key_of, settings_as_data
from .worker import WORKER, may_work

log = logging.getLogger("foregrad.backends")


def later_for(pipeline: Pipeline) -> Later | None:
    """The way to a graph's successor; None if calls are to wait for the pipeline's own compiler."""
    named = PARTITIONS.get(getattr(pipeline.partition, "__name__", "")) is pipeline.partition
    if not (config.background and pipeline.keeper is not None and named and may_work()):
        return None
    return Later(pipeline)


def drawing_as_eager(name: str) -> Backend:
    """The backend with Inductor's kernels that has this name, with eager's random numbers."""
    with_settings = get_backend(name).with_settings
    assert with_settings is not None
    return with_settings({"fallback_random": True})


def compiled_later(partition: Callable[..., Any]) -> tuple[dict[str, Any], Keeper]:
    """Arguments for a pipeline that compiles a graph captured without decompositions, and its cache on disk."""
    backend = drawing_as_eager("auto")
    keeper = keeper_for(backend, partition, None, is_quick=True)
    assert keeper is not None
    compilers = {name: getattr(backend, name) for name in ("fw_compiler", "bw_compiler", "inference_compiler")}
    passes = {name: getattr(backend, name) for name in ("prepare_joint", "prepare_halves")}
    return {**compilers, **passes, "partition": partition, "decompositions": None, "first": None}, keeper


class Later:
    """A graph on its way. `first` is the pipeline of the graphs that serve meanwhile."""

    def __init__(self, pipeline: Pipeline) -> None:
        first = pipeline.first
        assert first is not None
        self.first = dataclasses.replace(
            pipeline,
            fw_compiler=first.fw_compiler,
            bw_compiler=first.bw_compiler,
            inference_compiler=first.inference_compiler,
            partition=default_partition if pipeline.partition is fused_partition else pipeline.partition,
            decompositions=first.decompositions,
            prepare_joint=None,
            prepare_halves=None,
            keeper=None,
            first=None,
            _failures={},
        )
        self._pipeline = pipeline
        self._lock = make_lock()
        self._task: _Task | None = None

    def after_call(
        self, anew: Callable[..., Specialization], guards: Any, made: Specialization
    ) -> Specialization | None:
        """The specialization for later calls, None while it is on its way. `anew` makes it with the `guards`."""
        task = self._task
        if (task is not None and not task.is_over) or not self._lock.acquire(blocking=False):
            return None
        try:
            if task is None:
                if not may_work():
                    return made
                task = self._task = _Task(self._pipeline, made)
            return self._compiled(task, anew, guards, made) if task.is_over else None
        except Exception as error:  # the call has its result
            log.warning("`%s` stays on eager's kernels: %s", made.product.captured.joint.name, error)
            return made
        finally:
            self._lock.release()

    def _compiled(self, task: _Task, anew: Callable[..., Specialization], guards: Any, made: Specialization) -> Any:
        if task.why and not task.stays:
            log.warning("`%s` stays on eager's kernels: Inductor failed on its graph: %s", task.name, task.why)
            return made
        if task.stays:
            log.info("a graph of `%s` is compiled in this process: %s", task.name, task.why)
        options, keeper = compiled_later(self._pipeline.partition)
        options["keeper"] = dataclasses.replace(keeper, told=task.key) if task.key else None
        with compiling(task.name, verb="loading Inductor's kernels for"):
            new = anew(dataclasses.replace(self._pipeline, **options), task.kept, guards, made)
        say(f"`{task.name}` runs with Inductor's kernels now (after {time.perf_counter() - task.start:.0f} s)")
        return new


class _Task:
    """A graph for the process that compiles. `is_over`: it is compiled, or it failed, or it `stays` here."""

    def __init__(self, pipeline: Pipeline, made: Specialization) -> None:
        joint = made.product.compiled.partitioned.joint
        self.name, self.start = joint.name, time.perf_counter()
        self.key, self.why, self.stays, self.is_over = "", "", False, False
        self.kept = kept_after_decompositions(joint, made.product.captured.resumable)
        self._partition, self._regions = pipeline.partition, pipeline.regions
        self._context = contextvars.copy_context()  # has settings of Inductor's
        try:
            self._graph = graph_as_data(joint)
        except StaysError as why:
            self.done(str(why), stays=True)
        else:
            say(f"`{self.name}` runs with eager's kernels until Inductor's are compiled")
            WORKER.submit(self)

    def message(self) -> dict[str, Any] | None:
        return self._context.run(self._message)

    def _message(self) -> dict[str, Any] | None:
        _, keeper = compiled_later(self._partition)
        about, partition = circumstances(keeper), self._partition.__name__
        self.key = key_of(self._graph, self.kept, partition, self._regions, about)
        if keeper.store.read(digest(self.key)) is not None:
            return None
        return {
            "graph": self._graph,
            "kept": sorted(self.kept),
            "partition": partition,
            "regions": self._regions,
            "about": about,
            "key": self.key,
            "settings": settings_as_data(),
            "config": vars(config.value),
        }

    def done(self, why: str = "", *, stays: bool = False) -> None:
        if not why:
            for get_ready in given("what a first compiled graph waits for"):
                self._context.run(get_ready)
        self.why, self.stays, self._graph = why, stays, {}
        self.is_over = True


def kept_after_decompositions(joint: JointGraph, resumable: ResumableTrace | None) -> set[str]:
    """The nodes with values that are saved for further derivatives, of a graph that is decomposed after its capture.

    A derivative goes on from the captured graph, and finds few values of a decomposed graph there: it begins with the
    inputs, and with the numbers drawn.
    """
    if resumable is None or joint.signature.is_inference:
        return set()
    written = {update.input for update in joint.signature.updates}
    inputs = zip(joint.placeholders(), joint.signature.inputs, strict=False)
    names = {
        node.name
        for number, (node, info) in enumerate(inputs)
        if number not in resumable.valueless and (number not in written or info.requires_grad)
    }
    return names | kept_for_derivatives(joint, resumable) | set(resumable.random)
