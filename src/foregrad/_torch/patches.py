"""Patches of torch while a capture runs, effective on the capturing thread only. Checked on torch 2.13.0.

* `torch.nn.Module.__call__`: records the module that is running.
* `torch.nn.Module.__getattribute__`: records the module attributes that the function reads.
* `torch.nn.Module.__setattr__`: records attributes that are set to their present value.
* `torch.Tensor.__getattr__`: records reads of attributes that a tensor does not have.
* `torch.autograd.Function.apply`: passes stand-ins for closed-over tensors to custom Functions.
* the registration of hooks on nodes (`y.grad_fn.register_hook`): records the hooks that the backward calls.
* the engine behind `torch.autograd.grad` and `backward`: passes stand-ins to torch functions in the backward of a
  custom Function, and in hooks.
* `module.to(device)` and its like: nothing, where no tensor changes.

The subjects of a capture install the rest, see `Subjects.installers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import UnsupportedSideEffectError
from ..house import is_house_file, is_program_module
from ..interrupts import deliver, held, runs_user_code
from ..locks import Bind, ProcessPatch, Replacements, bound
from . import dynamo_off
from .native import make_attribute_reader
from .ops import Args, Kwargs
from .stand_ins import is_stand_in

RunRegion = Callable[[Callable[..., Any], Args, Kwargs], Any]


class FunctionsOfCapture(Protocol):
    """The capture's record of custom Functions that are applied."""

    def is_region(self, cls: object) -> bool:
        """Whether a Function is to run as an eager region."""

    def applied(self, cls: object, node: Any) -> None:
        """Note a Function that was applied. `node`: its context, None if there is no backward."""


Installer = Callable[[Bind, Callable[[], Any]], Callable[[], None] | None]


class Subjects:
    """The subjects of a capture, each known by its class."""

    by_class: Mapping[type, Any] = {}
    rows: Mapping[object, Callable[..., object]] = {}  # called in place of a torch function that a subject owns
    operators: Mapping[object, Callable[..., object]] = {}  # for operators and their namespaces

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def marks(self) -> list[Any]:
        """Marks of all entries so far: later entries may be dropped."""
        return []

    def drop(self, marks: list[object]) -> None:
        """Forget a trial's entries since `marks`."""

    def installers(self) -> Mapping[type, Installer]:
        """For each class, a function that installs its patches, given a function that binds a name and a function that
        gives the subject of the thread's capture.
        """
        return {}


class Hooks:
    """The calls of the patches to the capture of their thread. A capture has functions of its own for some."""

    aspects = Subjects()
    notes_reads = False  # whether `read` and `missing` are called
    region: RunRegion | None = None  # runs eager regions
    functions: FunctionsOfCapture | None = None
    leave_module: Callable[[], None] = staticmethod(lambda: None)
    """Called when a module's call ends."""
    enter_region: Callable[[], None] = staticmethod(lambda: None)
    """Called when a function marked by `foregrad.region` is called."""
    leave_region: Callable[[], None] = staticmethod(lambda: None)
    """Called when the call of a marked function ends."""
    missing: Callable[[torch.Tensor, str], None] = staticmethod(lambda tensor, name: None)
    """Called when an attribute is read that a tensor does not have."""
    node_hook: Callable[[Any, Callable[[object], object]], Any] = staticmethod(lambda hook, register: register(hook))
    """Register a hook of the program's on a node."""

    def __init__(self) -> None:
        self.applied: list[object] = []  # custom Functions with a running forward, the outermost first
        self.swaps: list[Callable[[Any], object]] = []  # of arguments of custom Functions, see `swapping`

    def enter_module(self, module: torch.nn.Module) -> None:
        """Called when a module is called."""

    def swap(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Args, Kwargs]:
        """The arguments with a stand-in for each real tensor."""
        raise NotImplementedError

    def engine(self, roots: Sequence[object] | None) -> contextlib.AbstractContextManager[None]:
        """The context that autograd's engine runs under. `roots`: the tensors it differentiates for `.grad`; None:
        `.grad` stays.
        """
        raise NotImplementedError

    def read(self, module: torch.nn.Module, name: str) -> None:
        """Called when an attribute of a module is read."""


_active = threading.local()
_original_call = torch.nn.Module.__call__
_original_tolist = torch._C.TensorBase.tolist
_original_reduce = torch.Tensor._reduce_ex_internal
_tensor: Any = torch.Tensor
_original_use_count = _tensor._use_count
_original_getattribute = object.__getattribute__
_original_setattr = torch.nn.Module.__setattr__
_original_moved: Callable[..., torch.nn.Module] = torch.nn.Module._apply
_original_apply = torch.autograd.Function.__dict__["apply"]
_autograd: Any = torch.autograd
_original_engine = _autograd._engine_run_backward
_registers = torch.autograd.function._HookMixin
_original_register = _registers.__dict__["_register_hook"]


MARK = "_foregrad_eager_region"
"""The attribute of modules that are eager regions."""
REGION = "_foregrad_region"
"""The attribute of modules that `foregrad.region` marked."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Called:
    """The unpatched call of a module or of a custom Function. Equal for equal owners."""

    original: Callable[..., object]
    owner: Any

    @property
    def __name__(self) -> str:
        return (self.owner if isinstance(self.owner, type) else type(self.owner)).__qualname__

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.original(self.owner, *args, **kwargs)


@runs_user_code
def _call(self: torch.nn.Module, *args: object, **kwargs: object) -> Any:
    hooks: Hooks | None = getattr(_active, "hooks", None)
    if hooks is None:
        return _original_call(self, *args, **kwargs)
    if held.pending:
        deliver()
    if hooks.region is not None and MARK in _original_getattribute(self, "__dict__"):
        return hooks.region(_Called(_original_call, self), args, kwargs)
    hooks.enter_module(self)
    try:
        return _original_call(self, *args, **kwargs)
    finally:
        hooks.leave_module()


@runs_user_code
def call_marked(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call a function that `foregrad.region` marked."""
    hooks: Hooks | None = getattr(_active, "hooks", None)
    if hooks is None:
        return function(*args, **kwargs)
    hooks.enter_region()
    try:
        return function(*args, **kwargs)
    finally:
        hooks.leave_region()


def _tolist(self: torch.Tensor) -> object:
    """`Tensor.tolist` reads memory: a stand-in has none."""
    hooks: Hooks | None = getattr(_active, "hooks", None)
    return _original_tolist(self) if hooks is None or not is_stand_in(self) else numbers_in(self)


def numbers_in(tensor: torch.Tensor) -> Any:
    """`tensor.tolist()`, number by number."""
    return tensor.item() if tensor.dim() == 0 else [numbers_in(row) for row in tensor.unbind(0)]


def _reduce(self: torch.Tensor, proto: int) -> object:
    """A tensor's data for pickles, copies and files; for plain tensors it calls no torch function."""
    if not is_capturing() or not is_stand_in(self):
        return _original_reduce(self, proto)
    return torch.overrides.handle_torch_function(torch.Tensor.__reduce_ex__, (self,), self, proto)


def _use_count(self: torch.Tensor) -> int:
    """`Tensor._use_count`; `torch.utils.swap_tensors` calls it before it exchanges anything."""
    if is_capturing():
        raise UnsupportedSideEffectError(
            "the tensors behind two objects are exchanged (`torch.utils.swap_tensors`), or a tensor's use count is "
            "read: a compiled call can't repeat that. Do it outside the compiled function."
        )
    return int(_original_use_count(self))


def _moved(self: torch.nn.Module, fn: Callable[[object], object], recurse: bool = True) -> torch.nn.Module:
    """`module.to(device)`, `.float()`, `.cpu()`: nothing, if they change no tensor of the module.

    PyTorch then assigns each parameter to itself (`param.data = param`). Fake parameters would be replaced.
    """
    if is_capturing():
        held_tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        with torch.no_grad():
            applied = [(fn(tensor), tensor) for tensor in held_tensors]
            if all(after is tensor or after is swapped(tensor) for after, tensor in applied):
                return self
    return _original_moved(self, fn, recurse)


_SCRIPTED_CODE = (torch.jit._script.__file__, torch.jit._trace.__file__)
_MODULE_CODE = torch.nn.Module.__getattr__.__code__.co_filename
_ALL = "*"
# By the id of the code, since the hash of code is computed anew each time; one entry for each function that reads.
_NOT_READ_BY: dict[int, tuple[str, types.CodeType]] = {}


def _not_read_by(file: str) -> str:
    """The attribute that code in a file reads for itself, not for the user's function; all for foregrad's code."""
    if is_house_file(file) or file in _SCRIPTED_CODE:
        return _ALL
    return "__dict__" if file == _MODULE_CODE else ""  # PyTorch reads a module's tables for every attribute


def _getattribute(self: torch.nn.Module, name: str) -> object:
    hooks: Hooks | None = getattr(_active, "hooks", None)
    if hooks is not None and hooks.notes_reads:
        reader = sys._getframe(1).f_code
        entry = _NOT_READ_BY.get(id(reader))
        if entry is None:
            entry = _NOT_READ_BY[id(reader)] = (_not_read_by(reader.co_filename), reader)
        unread = entry[0]
        if unread not in (name, _ALL):
            hooks.read(self, name)
    return _original_getattribute(self, name)


@functools.cache
def _attribute_reader() -> object:
    return make_attribute_reader(torch.nn.Module, _active, _not_read_by) or _getattribute


def _setattr(self: torch.nn.Module, name: str, value: Any) -> None:
    """`Module.__setattr__`: a write of the present object changes nothing while that is there, so it is a read."""
    hooks: Hooks | None = getattr(_active, "hooks", None)
    if hooks is not None and hooks.notes_reads:
        own = _original_getattribute(self, "__dict__")
        tables = (own, own.get("_buffers", own), own.get("_parameters", own))
        if any(table.get(name, _ALL) is value for table in tables):
            hooks.read(self, name)
    _original_setattr(self, name, value)


def _missing(self: torch.Tensor, name: str) -> Any:
    hooks: Hooks | None = getattr(_active, "hooks", None)
    if hooks is not None and hooks.notes_reads:
        reader = sys._getframe(1).f_globals.get("__name__")
        if is_program_module(reader) and name != "_wrapped_number":  # C++ reads it of a number's tensor
            with torch._C.DisableTorchFunction():  # as in `_swap`
                hooks.missing(self, name)
    raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self)


@runs_user_code
def _apply(cls: type[object], /, *args: object, **kwargs: object) -> Any:
    hooks: Hooks | None = getattr(_active, "hooks", None)
    if hooks is not None:
        functions = hooks.functions
        if functions is not None and hooks.region is not None and functions.is_region(cls):
            return hooks.region(_Called(_run_function, cls), args, kwargs)
        args, kwargs = _swap(hooks, args, kwargs)
        hooks.applied.append(cls)
        try:
            results = _run_function(cls, *args, **kwargs)
        finally:
            hooks.applied.pop()
        if functions is not None:
            functions.applied(cls, _node_of(cls, results))
        return results
    return _run_function(cls, *args, **kwargs)


def _node_of(cls: object, results: object) -> Any:
    """The node of a custom Function, its context too; None if there is no backward."""
    with torch._C.DisableTorchFunction():  # a torch function would be recorded as the program's
        results = results if isinstance(results, tuple) else (results,)
        nodes = [result.grad_fn for result in results if isinstance(result, torch.Tensor)]
    return next((node for node in nodes if getattr(node, "_forward_cls", None) is cls), None)


def _run_function(cls: object, *args: object, **kwargs: object) -> Any:
    """PyTorch's own `apply`: a class method, written in C since 2.15."""
    return _original_apply.__get__(None, cls)(*args, **kwargs)


def applied_function() -> Any:
    """The user's outermost custom Function in its forward or backward, in the thread's capture; or None."""
    hooks: Hooks | None = getattr(_active, "hooks", None)
    node = torch._C._current_autograd_node()
    classes = [getattr(type(node), "_forward_cls", None), *(hooks.applied if hooks is not None else ())]
    return next((c for c in classes if c is not None and is_program_module(c.__module__)), None)


def _swap(hooks: Hooks, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Args, Kwargs]:
    with torch._C.DisableTorchFunction():  # `swap` reads facts of tensors: a mode would swap them first
        for swap in reversed(hooks.swaps):
            args, kwargs = swap(args), swap(kwargs)
        return hooks.swap(args, kwargs)


def swapped(value: torch.Tensor) -> torch.Tensor:
    """The stand-in for a tensor in the thread's capture; the tensor itself where there is none."""
    hooks: Hooks | None = getattr(_active, "hooks", None)
    return value if hooks is None else _swap(hooks, (value,), {})[0][0]


def _engine(*args: Any, **kwargs: Any) -> Any:
    hooks: Hooks | None = getattr(_active, "hooks", None)
    roots = args[0] if kwargs.get("accumulate_grad", False) else None
    with contextlib.nullcontext() if hooks is None else hooks.engine(roots):
        return _original_engine(*args, **kwargs)


def _register_on_node(table: Any, hook: Any) -> object:
    """Register a hook on a node; hooks that PyTorch's own code registers (for hooks of modules) are not recorded."""
    hooks: Hooks | None = getattr(_active, "hooks", None)
    register = functools.partial(_original_register.__func__, table)
    if hooks is None:
        return register(hook)
    is_programs = is_program_module(sys._getframe(1).f_globals.get("__name__"))
    return hooks.node_hook(hook, register) if is_programs else register(hook)


def hooks_off() -> contextlib.AbstractContextManager[None]:
    """Context: the patches have no effect on this thread."""
    return bound(_active, "hooks", None)


def region_runner() -> RunRegion | None:
    """The function that runs eager regions on this thread; None if there is none."""
    hooks: Hooks | None = getattr(_active, "hooks", None)
    return None if hooks is None else hooks.region


@contextlib.contextmanager
def swapping(swap: Callable[[object], object]) -> Iterator[None]:
    """Context: custom Functions get the results of `swap` for their arguments, before any other swap."""
    hooks: Hooks | None = getattr(_active, "hooks", None)
    if hooks is None:
        yield
        return
    hooks.swaps.append(swap)
    try:
        yield
    finally:
        hooks.swaps.pop()


def _subject(kind: type) -> object:
    hooks: Hooks | None = getattr(_active, "hooks", None)
    return None if hooks is None else hooks.aspects.by_class.get(kind)


def is_capturing() -> bool:
    """Whether this thread captures."""
    return getattr(_active, "hooks", None) is not None


_replaced = Replacements()


def _install() -> None:
    try:
        _bind_all()
    except BaseException:  # a `RecursionError` of a call that is deep in the stack, for one
        _remove()
        raise


def _bind_all() -> None:
    bind = _replaced.bind
    dynamo_off.note_tables()
    bind(torch.nn.Module, "__call__", _call)
    bind(torch.nn.Module, "__getattribute__", _attribute_reader())
    bind(torch.nn.Module, "__setattr__", _setattr)
    bind(torch.nn.Module, "_apply", _moved)
    bind(torch.Tensor, "tolist", _tolist)
    bind(torch.Tensor, "_reduce_ex_internal", _reduce)
    bind(torch.Tensor, "_use_count", _use_count)
    bind(torch.Tensor, "__getattr__", _missing)
    bind(torch.autograd.Function, "apply", classmethod(_apply))
    bind(torch.autograd, "_engine_run_backward", _engine)
    bind(_registers, "_register_hook", staticmethod(_register_on_node))
    for kind, install in _installers.items():
        _restoring.append(install(bind, functools.partial(_subject, kind)))
    dynamo_off.install(bind, is_capturing, region_runner)


def _remove() -> None:
    _replaced.restore()
    while _restoring:
        restore = _restoring.pop()
        if restore is not None:
            restore()
    dynamo_off.forget_replacements()


_installers: dict[type, Installer] = {}
_restoring: list[Callable[[], None] | None] = []
_patches = ProcessPatch(_install, _remove)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Context: code that runs here is not captured."""
    with torch._C.DisableTorchFunction(), bound(_active, "hooks", None):
        yield


@contextlib.contextmanager
def patched(hooks: Hooks) -> Iterator[None]:
    """Context: the patches are in effect for this thread, and for no other."""
    _installers.update(hooks.aspects.installers())
    with _patches, dynamo_off.dynamo_off(), bound(_active, "hooks", hooks):
        yield
