"""Shared state of threads that capture and compile; a forked child inherits none from other threads.

Locks, the turn that threads take to make graphs for one function, and patches of the whole process that are in place
while any thread needs them: names of other modules that are bound to something else.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from .interrupts import deliver

__all__ = ["cached_property"]  # handed on

PATIENCE_S = 2.0  # wait for a second thread that captures this function, while the user's code runs there
_LOOK_AGAIN_S = 0.05

_LONGEST_IMPORT_S = 30.0

_all: weakref.WeakSet[Any] = weakref.WeakSet()
_in_place: list[ProcessPatch] = []


def make_lock() -> Any:
    """A re-entrant lock. In a forked child it is free, unless the thread that forked held it."""
    lock = threading.RLock()
    _all.add(lock)
    return lock


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:  # noqa: N801 (it stands for functools')
        """`functools.cached_property` without its lock: a forked child would inherit it from a thread of its parent."""

        def __init__(self, compute: Callable[[object], object]) -> None:
            self.compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.name] = self.compute(instance)
            return value


@contextlib.contextmanager
def taken(lock: Any) -> Iterator[None]:
    """Context: a lock is held. Signals are handled while waiting for the lock."""
    while not lock.acquire(timeout=_LOOK_AGAIN_S):
        deliver(anywhere=True)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context: a thread of foregrad's own imports modules. A fork waits for its end; a child would find the modules'
    locks taken for ever.
    """
    with _imports:
        yield


_imports = make_lock()
_holding_imports: set[int] = set()  # the threads that fork


def _before_fork() -> None:
    if _imports.acquire(timeout=_LONGEST_IMPORT_S):
        _holding_imports.add(threading.get_ident())
    for each in _in_place:  # held only while a patch is put in place, so none is half in place at the fork
        each.lock.acquire()


def _in_parent() -> None:
    for each in _in_place:
        each.lock.release()
    _let_import()


def _let_import() -> None:
    if threading.get_ident() in _holding_imports:
        _holding_imports.remove(threading.get_ident())
        _imports.release()


def _in_child() -> None:
    for lock in list(_all):
        if not lock._is_owned():
            lock._at_fork_reinit()
    for each in _in_place:
        each.forget_other_threads()
        each.lock.release()
    _let_import()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


class ProcessPatch:
    """A context around a patch of the whole process: the first thread that enters installs it, the last removes it."""

    def __init__(self, install: Callable[[], None], remove: Callable[[], None]) -> None:
        self._install = install
        self._remove = remove
        self.lock = make_lock()
        self._depths: dict[int, int] = {}  # by thread
        _in_place.append(self)

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self.lock:
            if not self._depths:
                self._install()
            self._depths[me] = self._depths.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with self.lock:
            self._depths[me] -= 1
            if not self._depths[me]:
                del self._depths[me]
                if not self._depths:
                    self._remove()

    def forget_other_threads(self) -> None:
        """In a forked child: only the thread that forked is left."""
        me = threading.get_ident()
        if self._depths and me not in self._depths:
            self._remove()
        self._depths = {me: self._depths[me]} if me in self._depths else {}


Bind = Callable[[object, str, object], None]
"""How a name in a module or class is bound to something else: see `Replacements.bind`."""


class Replacements:
    """Names in modules, classes and objects that are bound to something else for a time."""

    names: ClassVar[set[tuple[int, str]]] = set()
    """All of modules and classes that were ever bound, with the ids of their owners."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def bind(self, owner: object, name: str, value: object) -> None:
        """Bind a name, of its own or inherited, until `restore` is called."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        if isinstance(owner, (type, types.ModuleType)):
            self.names.add((id(owner), name))
        _put(owner, name, value)

    def restore(self) -> None:
        """Restore every name's binding, or unbind a name that was not its owner's."""
        while self._before:
            _put(*self._before.pop())


_ABSENT: object = object()


def _put(owner: object, name: str, value: object) -> None:
    """Bind a name, or unbind it where the value is `_ABSENT`."""
    if _keeps_slot(owner, name, value):
        table = gc.get_referents(vars(owner))[0]
        before = table.get(name)  # other threads may find it in the type's cache until that knows of the change
        if value is _ABSENT:
            del table[name]
        else:
            table[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
        del before
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _keeps_slot(owner: object, name: str, value: object) -> bool:
    """Whether a class and its subclasses call a special method from equal slots before and after: the table of the
    class is enough then. An assignment looks for the name anew in every subclass, and `torch.nn.Module` has hundreds: a
    tenth of the time of a capture.

    All methods of Python are called from one slot, `__getattribute__` from `__getattr__`'s.
    """
    if type(owner) is not type or name not in ("__call__", "__setattr__", "__getattribute__"):
        return False
    own = vars(owner)
    methods = [own.get(name, _ABSENT), value]
    if name == "__getattribute__":
        methods = [own.get("__getattr__", _ABSENT), *(method for method in methods if method is not _ABSENT)]
    return all(method is not _ABSENT and not isinstance(method, types.WrapperDescriptorType) for method in methods)


@contextlib.contextmanager
def bound(owner: object, name: str, value: object) -> Iterator[None]:
    """Context: a name of an object or of a thread's is bound to something else."""
    replaced = Replacements()
    replaced.bind(owner, name, value)
    try:
        yield
    finally:
        replaced.restore()


class Turn:
    """One thread at a time captures and compiles a function.

    A capture runs the user's code, and this may wait for a second thread; if the second thread calls the function, each
    waits for the other. So no thread waits long while the user's code may be running.
    """

    def __init__(self) -> None:
        self._lock = make_lock()
        self._runs_user_code = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[bool]:
        """Context: whether this thread has the turn; False for a thread that has waited for `PATIENCE_S`."""
        if not self._wait():
            yield False
            return
        try:
            with bound(_thread, "turn", self), bound(self, "_runs_user_code", True):
                yield True
        finally:
            self._lock.release()

    def _wait(self) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        waited = 0.0
        while waited < PATIENCE_S:
            start = time.monotonic()
            if self._lock.acquire(timeout=_LOOK_AGAIN_S):
                return True
            deliver(anywhere=True)
            if self._runs_user_code:
                waited += time.monotonic() - start
        return False


_thread = threading.local()


def without_user_code() -> contextlib.AbstractContextManager[None]:
    """Context: no code of the user's runs here, so other threads may wait for its end."""
    turn: Turn | None = getattr(_thread, "turn", None)
    return contextlib.nullcontext() if turn is None else bound(turn, "_runs_user_code", False)
