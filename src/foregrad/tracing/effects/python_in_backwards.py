"""Python that a backward runs: what it reads, and the custom Functions and hooks that no graph can hold.

A backward reads what is there when it runs. What its code names is looked at, one helper function after the other.
Objects, containers and closure cells that are older than the call may be others by the time of the backward; so may the
numbers that are globals of a script, or that some function assigns. A number that is a global of a module, and that no
function there assigns, is taken for a constant, and so are a table of an installed package and a number in a variable
of an enclosing function that the code itself does not assign: somebody may still set these between a forward and its
backward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from ..._torch.dispatch import without_torch_functions
from ...errors import UnsupportedError, UnsupportedMutationError, UnsupportedOpError, UnsupportedSideEffectError
from ...frontend.code import instructions_of, names_of
from ...frontend.expected import ABSENT, is_plain
from ...frontend.libraries import is_installed, is_of_library, is_outside
from ...frontend.objects import dict_of_class, values_of
from ...frontend.reads import Reads, hooks_of
from ...graph.eager_regions import differentiated_twice
from ...graph.python_calls import CALL, GradientHook
from ..recorder.recorder import Recorder
from ..tape.tape import CaptureAgain
from .eager_regions import Once
from .python_state import BackwardChangesError
from .result_hooks import needs_nothing, outside_of

_DEEPEST = 4
_CONTAINERS = (dict, list, set, tuple)
_NO_STATE = (types.ModuleType, types.BuiltinFunctionType, torch.Tensor)  # of tensors a graph tells by their versions


def reads_state(value: Any, knows: Callable[[Any], bool], depth: int = _DEEPEST) -> bool:
    """Whether code looks at something besides its arguments that may be another when it runs. `knows(object)`: it is
    older than the call.
    """
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.MethodType):
        owner, function = value.__self__, value.__func__
        if isinstance(function, types.FunctionType) and isinstance(owner, torch.nn.Module):
            named = names_of(function.__code__).others
            return _may_differ(owner, named, knows, depth) or reads_state(function, knows, depth)
        return not isinstance(owner, type) or reads_state(function, knows, depth)
    if not isinstance(value, types.FunctionType):
        return False
    if is_outside(value.__globals__.get("__name__", "")):
        return False
    names = names_of(value.__code__)
    for name in names.loaded:
        found = value.__globals__.get(name)
        if is_plain(found):
            if found is not None and _is_assigned(name, value.__globals__):
                return True
        elif isinstance(found, _CONTAINERS) and is_installed(value.__globals__):
            continue
        elif _may_differ(found, names.others, knows, depth):
            return True
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if name in names.cells and cell != types.CellType():
            found = cell.cell_contents
            if is_plain(found):
                if knows(cell) and _is_stored(name, value.__code__):
                    return True
            elif (knows(cell) or knows(found)) and _may_differ(found, names.others, knows, depth):
                return True
    return False


def holds_state(held: dict[str, Any], backward: Any, knows: Callable[[Any], bool]) -> bool:
    """Whether a context holds something that its backward looks at and that may be another by then."""
    code = getattr(backward, "__code__", None)
    named = frozenset() if code is None else names_of(code).others
    return any(
        not is_plain(value) and knows(value) and _may_differ(value, named, knows, _DEEPEST)
        for name, value in held.items()
        if name in named
    )


def check_module_hooks(name: str, modules: Iterable[torch.nn.Module], knows: Callable[[Any], bool]) -> None:
    """Raise where a hook in the backward of a module looks at state: a graph has what was there in the capture."""
    for hook in hooks_of(modules, in_backward=True) if torch.is_grad_enabled() else ():
        if reads_state(hook, knows):
            raise UnsupportedSideEffectError(
                f"`{name}` calls a module with the backward hook `{getattr(hook, '__name__', type(hook).__name__)}`, "
                "which looks at Python's state, and that may be another by the time of the backward. Call `backward()` "
                "inside the compiled function, or put the hook on what the module gives (`y.register_hook`)."
            )


def _may_differ(found: Any, named: frozenset[str], knows: Callable[[Any], bool], depth: int) -> bool:
    if isinstance(found, _NO_STATE):
        return False
    if isinstance(found, type):
        bases = [base for base in found.__mro__ if not is_of_library(base)]
        if not named.isdisjoint(name for base in bases for name in values_of(base)):
            return True
        items = (vars(base)[name] for base in bases for name in named & vars(base).keys())
        methods = (getattr(item, "__func__", item) for item in items)
        return depth > 0 and any(_method_reads(found, method, knows, depth - 1) for method in methods)
    if isinstance(found, types.FunctionType):
        return depth > 0 and reads_state(found, knows, depth - 1)
    if isinstance(found, torch.nn.Module):
        held = [_held(found, name) for name in named]
        return depth == 0 or any(_may_differ(value, named, knows, depth - 1) for value in held if value is not ABSENT)
    return True


def _method_reads(owner: type, method: Any, knows: Callable[[Any], bool], depth: int) -> bool:
    """Whether a method looks at state, that of its class included."""
    if not isinstance(method, types.FunctionType):
        return False
    return _may_differ(owner, names_of(method.__code__).others, knows, depth) or reads_state(method, knows, depth)


def _held(module: torch.nn.Module, name: str) -> Any:
    """An attribute of a module: a parameter, buffer, submodule, or what its `__dict__` or its class holds."""
    table = module.__dict__
    tables = (table.get("_parameters"), table.get("_buffers"), table.get("_modules"), table)
    classes = (vars(base) for base in type(module).__mro__ if not is_of_library(base))
    return next((held[name] for held in (*tables, *classes) if held is not None and name in held), ABSENT)


def _is_stored(name: str, code: types.CodeType) -> bool:
    """Whether a function, or one inside of it, assigns a variable of an enclosing function."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    stores = ("STORE_DEREF", name) in {(i.name, i.value) for i in instructions_of(code)}
    return stores or any(_is_stored(name, other) for other in inner)


def _is_assigned(name: str, namespace: dict[str, Any]) -> bool:
    """Whether a global may be assigned while the program runs: by a script, or by a function of its module."""
    if namespace.get("__name__") == "__main__":
        return True
    held: list[Any] = []
    for value in namespace.values():
        held += vars(value).values() if isinstance(value, type) else [value]
    codes = [value.__code__ for value in held if isinstance(value, types.FunctionType)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        if name in code.co_names and ("STORE_GLOBAL", name) in {(i.name, i.value) for i in instructions_of(code)}:
            return True
    return False


# -------------------------------------------------------------------- custom Functions
# Custom autograd Functions of the user's that no graph can hold: they run as eager regions, their backwards too. What
# such a Function does in Python then happens as it does in eager: it hands tensors to NumPy, reads the value of a
# gradient, counts its backwards or keeps what came by.


class CustomFunctions:
    """The custom Functions that a run applies. `regions`: eager regions, for each run of the capture; `may_run`:
    whether there may be any. `knows(object)`: it is older than the call.
    """

    def __init__(self, regions: set[Any], reads: Reads, knows: Callable[[Any], bool], *, may_run: bool) -> None:
        self.regions, self.reads, self.knows, self.may_run = regions, reads, knows, may_run
        self._applied: dict[Any, None] = {}

    def is_region(self, cls: Any) -> bool:
        """Whether a Function that is applied is to run as an eager region."""
        if not is_of_library(cls):
            if cls not in self._applied and self.may_run and cls not in differentiated_twice:
                backward = getattr(cls, "backward", None)
                if cls not in self.regions and torch.is_grad_enabled() and reads_state(backward, self.knows):
                    self.regions.add(cls)
                    raise CaptureAgain  # what it looks at is not looked at before
            if cls not in self._applied:
                place = self.reads.place(dict_of_class(cls), "dict", cls.__name__, "attr")
                for name in vars(cls).keys() & {"forward", "setup_context", "backward", "vjp"}:
                    self.reads.add(place, name, vars(cls)[name])
            self._applied[cls] = None
        return cls in self.regions

    def applied(self, cls: Any, context: dict[str, Any]) -> None:
        """Raise where the backward reads an object of `context` that is older than the call: it may change by then."""
        if cls in self._applied and holds_state(context, getattr(cls, "backward", None), self.knows):
            raise UnsupportedSideEffectError(
                f"the context of `{cls.__name__}` holds an object that was there before, and its backward looks at it: "
                "it may be another by then. Give the Function the values that it needs."
            )

    def check_absent(self, name: str, tangents: int) -> None:
        """Raise where a Function's backward is told which results have no gradient, and a caller may leave some out."""
        for cls in self._applied if tangents > 1 else ():
            codes = [getattr(getattr(cls, part, None), "__code__", None) for part in ("forward", "setup_context")]
            asks = any("set_materialize_grads" in names_of(code).others for code in codes if code is not None)
            backward = _backward(cls)
            if asks and cls not in self.regions and backward is not None and backward.co_argcount != 2:
                raise UnsupportedError(
                    f"`{name}` applies `{cls.__name__}`, whose backward is told which of its results have no gradient "
                    f"(`set_materialize_grads(False)`), and gives {tangents} results that a gradient may come to or "
                    "not. Compute one result of them, such as a loss, in the function."
                )

    def on_numpy(self, cls: Any) -> None:
        """One hands tensors to NumPy: it runs as an eager region from now on."""
        if cls not in differentiated_twice:
            self.regions.add(cls)
            raise CaptureAgain

    def isolate(self, error: BaseException) -> bool:
        """Whether the backwards of some are refused for `error`, and run as they are from now on: another run is to be
        made.
        """
        # A region has aliases of its arguments: sizes and memory that its backward gives them are not the user's.
        if not (self.may_run and isinstance(error, UnsupportedError)) or isinstance(error, UnsupportedMutationError):
            return False
        refused = [*codes_on_the_way(error)]
        is_any = isinstance(error, BackwardChangesError)  # of which it is not known
        found = {cls for cls in self._applied if is_any or _backward(cls) in refused}
        found.difference_update(differentiated_twice)
        is_news = not found <= self.regions
        self.regions |= found
        return is_news


def _backward(cls: Any) -> Any:
    return getattr(getattr(cls, "backward", None), "__code__", None)


def codes_on_the_way(error: BaseException) -> Iterator[types.CodeType]:
    """The code that an exception came through."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


# -------------------------------------------------------------------- hooks
# Hooks on a function's own tensors that no graph can hold: each backward calls them, on real gradients. They write to
# Python's state, read the value of a gradient, print it or hand it to NumPy. Tracing one shows that; from the next run
# of the capture on, it is an operator of the backward.


class EagerHooks:
    """The eager hooks of one run. `learned`: their functions, by what tells a hook (see `_key`); `made`:
    what the graph's operators refer to. `knows(object)`: it is older than the call.
    """

    def __init__(
        self,
        learned: dict[Any, Any],
        made: list[Any],
        recorder: Recorder,
        function: Any,
        knows: Callable[[Any], bool],
        *,
        may_run: bool,
    ) -> None:
        self.learned, self.made, self.recorder, self.knows, self.may_run = learned, made, recorder, knows, may_run
        self.outside = outside_of(function)
        self._met: dict[Any, Any] = {}

    def instead(self, hook: Any) -> Any:
        """What is to be registered in the place of a hook."""
        key = _key(hook)
        if key is None or not self.may_run or self.recorder.in_backward:
            return hook
        reads = reads_state(hook, self.knows)
        if key in differentiated_twice or not needs_nothing(hook, self.outside, self.knows):
            if reads:
                raise UnsupportedSideEffectError(
                    f"a hook that is put on a tensor at {self.recorder.where()} looks at Python's state, which may be "
                    "another by the time of the backward, and at what the call computes: no graph holds both. Let the "
                    "hook look at one of them."
                )
            return hook
        self._met[key] = hook
        if reads and key not in self.learned:
            self.learned[key] = _function(hook)
            raise CaptureAgain  # what it looks at is not looked at before
        if key not in self.learned:
            return hook
        called = GradientHook(hook, str(getattr(hook, "__name__", type(hook).__name__)), self.recorder.where())
        self.made.append(called)
        return _Call(self.recorder, called, key)

    def isolate(self, error: BaseException) -> bool:
        """Whether hooks are refused for `error`, and are eager from now on: another run is to be made."""
        if not isinstance(error, UnsupportedError) or isinstance(error, UnsupportedMutationError):
            return False
        refused = [*codes_on_the_way(error)]
        is_any = isinstance(error, BackwardChangesError)  # of which it is not known
        found = {key: hook for key, hook in self._met.items() if key not in self.learned and (is_any or key in refused)}
        self.learned |= {key: _function(hook) for key, hook in found.items()}
        return bool(found)


def _key(hook: Any) -> Any:
    """What tells a hook in another run: its code. A method of a list has none, and the call itself reads that list."""
    return getattr(_function(hook), "__code__", None)


def _function(hook: Any) -> Any:
    while isinstance(hook, (functools.partial, types.MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook


class _Call:
    """In the place of a hook, while the backward is recorded."""

    def __init__(self, recorder: Recorder, called: GradientHook, key: Any) -> None:
        self.recorder, self.called, self.key = recorder, called, key

    def __call__(self, gradient: torch.Tensor) -> Any:
        return Once.apply(lambda: self.result(gradient), self.refuse, gradient)

    def result(self, gradient: torch.Tensor) -> torch.Tensor:
        """The stand-in of what the hook makes of a gradient."""
        recorder = self.recorder
        if gradient.layout is not torch.strided:
            raise recorder.sparse.refused()
        with without_torch_functions():
            spec = recorder.spec_of(recorder.run_fake(torch.ops.aten.clone.default, (gradient,), {}))
            inputs: list[Any] = [recorder.to_entries(gradient)]
            entry = recorder.entry(CALL, (self.called.key, inputs, [], []), {}, is_random=False)
            results: list[torch.Tensor] = recorder.bind_results(entry, [recorder.fake_of(spec)], [spec])
        return results[0]

    def refuse(self) -> NoReturn:
        """What the hook gives is differentiated."""
        differentiated_twice.add(self.key)
        raise UnsupportedOpError(
            f"the hook `{self.called.name}` registered at {self.called.where} is differentiated, and it does what no "
            "graph holds. Compile the function again: its calls run eagerly then."
        )
