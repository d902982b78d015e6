"""Python that a backward runs: the custom Functions and hooks that no graph can hold."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.hooks import BackwardHook

from .._torch.engine import without_torch_functions
from .._torch.stand_ins import is_stand_in
from .._torch.symbols import is_symbolic
from .._torch.tensors import history_of
from .._torch.wrappers import is_wrapper
from ..errors import (
    UnsupportedError,
    UnsupportedMutationError,
    UnsupportedOpError,
    UnsupportedSideEffectError,
    UnsupportedTensorError,
)
from ..frontend.answers import PlacesRead
from ..graph.call_effects import CallPlace, EffectTarget, EffectWriter, TensorEffect
from ..graph.calls import CALL
from ..graph.signature import Handle, OutputInfo
from ..identity import ById, IdSet
from ..locks import Bind
from ..python.code import names_of
from ..python.libraries import is_of_library
from ..python.objects import CALLED_BY_AUTOGRAD
from ..python.output import ProgramOutput
from ..tracing.aspect import Aspect, Finished, Settled
from ..tracing.effects.results import Returned
from ..tracing.heap.recording import Host
from ..tracing.heap.records import InputRecord, is_moved
from ..tracing.inputs.inputs import Inputs
from ..tracing.inputs.open_inputs import OpenInput
from ..tracing.recorder.recorder import Recorder
from ..tracing.tape.again import BackwardChangesError, CaptureAgain
from ..tracing.tape.gradient_paths import passed_through
from .calls import differentiated_twice
from .captured import Once
from .hook_calls import GradientHook
from .read_in_backwards import function_of, holds_state, looks_inside, reads_state

# -------------------------------------------------------------------- custom Functions
# Custom autograd Functions of the user's that no graph can hold: they run as eager regions, their backwards too. The
# Function's Python then runs as in eager: it hands tensors to NumPy, reads the value of a gradient, counts its
# backwards or keeps what came by.


class CustomFunctions(Aspect):
    """The custom Functions that a run applies. `regions`: eager regions, for each run of the capture; `may_run`:
    whether there may be any. A backward inside the function is a part of the function, and no region.
    """

    def __init__(self, host: Host, recorder: Recorder, regions: set[Any], reads: PlacesRead, *, may_run: bool) -> None:
        self.host, self.recorder, self.regions, self.reads, self.may_run = host, recorder, regions, reads, may_run
        self._applied: dict[Any, None] = {}
        self._inside: set[Any] = set()  # a backward inside the function has come to them
        self._seen: set[Any] = set()  # a backward outside has
        self._held: set[Any] = set()  # a context holds an object that was there before
        self._contexts: list[tuple[Any, dict[str, Any]]] = []

    def is_region(self, cls: Any) -> bool:
        """Whether a Function that is applied is to run as an eager region."""
        if not is_of_library(cls):
            if cls not in self._applied:
                self.reads.class_attributes |= dict.fromkeys((cls, name) for name in CALLED_BY_AUTOGRAD)
            self._applied[cls] = None
        return cls in self.regions

    def _begins(self, cls: Any, gradients: Sequence[Any]) -> None:
        """The backward of a Function begins that is no region so far."""
        if not self.recorder.in_backward:
            self._inside.add(cls)
            return
        if cls in self._seen or cls in differentiated_twice:
            return
        self._seen.add(cls)
        if reads_state(cls.backward, self.host.met):
            self._make_regions(cls)
        if cls in self._held:
            raise _held_in(cls, "an object that was there before")

    def _make_regions(self, cls: Any) -> NoReturn:
        """Make regions of all Functions with a backward that reads state, for a next run: a region is never undone."""
        if cls in self._inside:
            raise looks_inside(cls.__name__, "and in one outside")
        if any(_backward(other) is _backward(cls) for other in self.regions):  # each run makes one
            raise _held_in(cls, "an object that was there before")
        late = [c for c in self._applied if c not in self._inside and c not in differentiated_twice]
        self.regions |= {c for c in late if reads_state(getattr(c, "backward", None), self.host.met)}
        raise CaptureAgain

    def finished(self, run: Finished) -> None:
        """Later traces of the backward ask nothing: the run is over."""
        self._seen.update(self._applied)

    def applied(self, cls: Any, node: Any) -> None:
        """Note where the backward reads an object of its context that is older than the call: it may change before a
        backward outside. Raise where that is not asked later.
        """
        context = {} if node is None else vars(node)
        is_asked = node is not None and cls in self._applied and self.may_run and cls not in differentiated_twice
        if is_asked:
            node.register_prehook(functools.partial(self._begins, cls))
        if cls in self._applied and holds_state(context, getattr(cls, "backward", None), self.host.met):
            if not is_asked:
                raise _held_in(cls, "an object that was there before")
            self._held.add(cls)
        self._contexts += [(cls, context)] if cls in self._applied else []

    def returned(self, results: Sequence[Any], paths: Sequence[str]) -> None:
        """Raise where a backward reads an object that the call makes and gives back."""
        is_given = self.host.gives_back
        for cls, context in self._contexts:
            backward = getattr(cls, "backward", None)
            names = reads_state(backward, is_given) and not reads_state(backward, self.host.met)
            if cls not in self.regions and (names or holds_state(context, backward, is_given)):
                raise _held_in(cls, "an object that the call gives back")

    def check_absent(self, name: str, tangents: int) -> None:
        """Raise where a Function's backward learns of results without a gradient, and a caller may leave some out."""
        for cls in self._applied if tangents > 1 else ():
            codes = [getattr(getattr(cls, part, None), "__code__", None) for part in ("forward", "setup_context")]
            asks = any("set_materialize_grads" in names_of(code).others for code in codes if code is not None)
            backward = _backward(cls)
            if asks and cls not in self.regions and backward is not None and backward.co_argcount != 2:
                raise UnsupportedError(
                    f"`{name}` applies `{cls.__name__}`, a Function with `set_materialize_grads(False)`, and returns "
                    f"{tangents} results; its backward depends on the results that receive a gradient. Compute a "
                    "single result, a loss, in the function."
                )

    def on_numpy(self, cls: Any) -> None:
        """One hands tensors to NumPy: it runs as an eager region from now on."""
        if cls not in differentiated_twice | self._inside:
            self.regions.add(cls)
            raise CaptureAgain

    def failed(self, error: BaseException) -> bool:
        """Whether `error` refuses some backwards, which run eagerly from now on: a further run is to be made."""
        # A region has aliases of its arguments: sizes and memory that its backward gives them are not the user's.
        if not (self.may_run and isinstance(error, UnsupportedError)) or isinstance(error, UnsupportedMutationError):
            return False
        refused = [*codes_on_the_way(error)]
        is_any = isinstance(error, BackwardChangesError)  # the error does not name the Function
        found = {cls for cls in self._applied if is_any or _backward(cls) in refused}
        found.difference_update(differentiated_twice, self._inside)
        is_news = not found <= self.regions
        self.regions |= found
        return is_news


def _held_in(cls: Any, what: str) -> UnsupportedSideEffectError:
    return UnsupportedSideEffectError(
        f"the context of `{cls.__name__}` holds {what}, and its backward reads the object: it may change before the "
        "backward. Pass the values to the Function."
    )


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


class EagerHooks(Aspect):
    """The eager hooks of one run. `learned`: their functions, by a hook's key (see `_key`), None for a hook of a
    backward inside the function, a part of the function; `made`: objects behind operators.
    """

    def __init__(
        self, host: Host, recorder: Recorder, learned: dict[Any, Any], made: list[Any], *, may_run: bool
    ) -> None:
        self.host, self.recorder, self.learned, self.made, self.may_run = host, recorder, learned, made, may_run
        self._traced: list[Any] = []
        self.outside = outside_of(host.call.function)
        self._met: dict[Any, Any] = {}
        self._warning: str | None = None
        output = host.aspects.by_class.get(ProgramOutput)
        if isinstance(output, ProgramOutput):
            output.is_of_backward = self.warns

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        make = BackwardHook.__init__

        def made(self: Any, module: Any, hooks: list[Any], pre_hooks: list[Any]) -> None:
            eager: EagerHooks | None = current() if torch.is_grad_enabled() else None
            if eager is not None:
                hooks = [eager.warn, *map(eager.on_module, hooks)]
                pre_hooks = list(map(eager.on_module, pre_hooks))
            make(self, module, hooks, pre_hooks)

        bind(BackwardHook, "__init__", made)

    def instead(self, hook: Any) -> Any:
        """The substitute to register for a hook."""
        if not self.may_run or self.recorder.in_backward:
            return hook
        return _HookCall(self, hook) if self._is_known(hook) else self.traced(hook)

    def on_module(self, hook: Any) -> Any:
        """The substitute for a hook of a module."""
        if self.may_run and not self.recorder.in_backward and self._is_known(hook):
            return _HookCall(self, hook)
        try:
            return self.traced(hook)
        except UnsupportedSideEffectError as error:
            return functools.partial(self._refused, error, hook)  # if the backward comes there

    def _refused(self, error: Exception, hook: Any, *args: Any) -> Any:
        """In a backward inside the function, the hook is a part of the function."""
        if self.recorder.in_backward:
            raise error
        return hook(*args)

    def _is_known(self, hook: Any) -> bool:
        """Whether the hook is eager, or is called in a backward inside the function."""
        key = _key(hook)
        if key is None or key in differentiated_twice or not needs_nothing(hook, self.outside, self.host.knows):
            return False
        self._met[key] = hook
        if key not in self.learned and reads_state(hook, self.host.met):
            self.learned[key] = _function(hook)
            raise CaptureAgain  # the next run looks at its state before
        return key in self.learned

    def warns(self, frame: types.FrameType, message: str) -> bool:
        """Whether PyTorch's warning about hooks on a module in the backward is left to each backward."""
        is_so = self.may_run and self.recorder.in_backward and frame.f_globals is vars(torch.utils.hooks)
        self._warning = message if is_so else None
        return is_so

    def warn(self, module: torch.nn.Module, given: Any, out: Any) -> Any:
        """The first hook of each module, right behind the warning."""
        message, self._warning = self._warning, None
        return None if message is None else _HookCall(self, functools.partial(_warn, message))(module, given, out)

    def traced(self, hook: Any) -> Any:
        """A hook with its present actions in the graph."""
        if reads_state(hook, self.host.met):
            raise self.looks(f"put on a tensor or a node at {self.recorder.where()}")
        self._traced.append(hook)
        return hook

    def returned(self, results: Sequence[Any], paths: Sequence[str]) -> None:
        """Raise where a hook reads an object that the call makes and gives back."""
        if any(reads_state(hook, self.host.gives_back) for hook in self._traced):
            raise self.looks("called in the backward")

    def looks(self, how: str) -> UnsupportedSideEffectError:
        return UnsupportedSideEffectError(
            f"a hook that is {how} reads Python state that may change before the backward, and also tensors of the "
            "call: no graph can hold both. Move one of the reads out of the hook."
        )

    def failed(self, error: BaseException) -> bool:
        """Whether `error` refuses hooks, which are eager from now on: a further run is to be made."""
        if not isinstance(error, UnsupportedError) or isinstance(error, UnsupportedMutationError):
            return False
        refused = [*codes_on_the_way(error)]
        is_any = isinstance(error, BackwardChangesError)  # the error does not name the hook
        found = {key: hook for key, hook in self._met.items() if key not in self.learned and (is_any or key in refused)}
        self.learned |= {key: _function(hook) for key, hook in found.items()}
        return bool(found)


def _key(hook: Any) -> Any:
    """A hook's key across runs: its code. A method of a list has no code, and the call itself reads the list."""
    return getattr(_function(hook), "__code__", None)


def _function(hook: Any) -> Any:
    called, _ = function_of(hook, lambda _: True)
    return getattr(called, "__func__", called)


def _warn(message: str, *_: Any) -> None:
    warnings.warn(message, stacklevel=2)


class _HookCall:
    """In the place of a hook, while the backward is recorded."""

    def __init__(self, hooks: EagerHooks, hook: Any) -> None:
        self.hooks, self.hook, self.where = hooks, hook, hooks.recorder.where()
        self.name = str(getattr(hook, "__name__", type(hook).__name__))

    def __call__(self, *args: Any) -> Any:
        key, learned = _key(self.hook), self.hooks.learned
        if not self.hooks.recorder.in_backward:
            if learned.get(key) is None:
                return self.hook(*args)
            learned[key] = None
            raise CaptureAgain
        if key in learned and learned[key] is None:
            raise self.hooks.looks(f"called in a backward inside of the function and outside, used at {self.where},")
        module = args[0] if isinstance(args[0], torch.nn.Module) else None
        groups = (args,) if module is None else args[1:]
        there = tuple([tuple([gradient is not None for gradient in group]) for group in groups])
        called = GradientHook(self.hook, self.name, self.where, module, there)
        self.hooks.made.append(called)
        gradients = [gradient for group in groups for gradient in group if gradient is not None]
        results = iter(Once.apply(lambda: self._results(called, gradients), self.refuse, *gradients))
        found = tuple([next(results) if is_there else None for is_there in there[0]])
        return found[0] if module is None else found

    def _results(self, called: GradientHook, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The stand-ins of the hook's results."""
        recorder = self.hooks.recorder
        for gradient in gradients:
            if is_wrapper(gradient):
                raise UnsupportedTensorError(
                    f"the hook `{self.name}` registered at {self.where} runs Python on a "
                    f"{type(gradient).__qualname__}, and no graph can hold this. Put the hook on the result of the "
                    "compiled function."
                )
            if gradient.layout is not torch.strided:
                recorder.value_of(gradient)  # raises
        with without_torch_functions():
            firsts = gradients[: sum(called.groups[0])]
            specs = [recorder.spec_of(recorder.run_fake(torch.ops.aten.clone.default, (g,), {})) for g in firsts]
            entry = recorder.entry(CALL, (called.key, recorder.to_entries(gradients), [], []), {}, is_random=False)
            return tuple(recorder.bind_results(entry, list(map(recorder.fake_of, specs)), specs))

    def refuse(self) -> NoReturn:
        """The hook's result is differentiated."""
        differentiated_twice.add(_key(self.hook))
        raise UnsupportedOpError(
            f"the hook `{self.name}` registered at {self.where} is differentiated, and it runs Python that no graph "
            "can hold. Compile the function again: its calls then run eagerly."
        )


# -------------------------------------------------------------------- result hooks
# Hooks that a function puts on its own tensors and that are still there when it returns these.
#
# In eager such a hook runs before the caller's use of the result's gradient: `.grad`, a later hook,
# `torch.autograd.grad` by the result. A hook traced into the backward would run after. So a hook that needs nothing of
# the run is put on the real result by each call. A hook that needs the run is traced, and then the result's gradient
# can not be watched.
#
# A hook on a node (`y.grad_fn.register_hook`) is traced with the backward. A hook that the backward does not reach is
# on the node of a returned view (each call takes the view anew of its base), or on a leaf's node.


_PLAIN = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.layout, types.ModuleType)
_DEEPEST_HELD = 6


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _RegisteredHook:
    """A hook of a tensor: its key in the tensor's table, the tensor's history by then, the user's line."""

    tensor: torch.Tensor
    hook: Any
    key: int
    history: Any
    line: str


@dataclasses.dataclass(slots=True, eq=False)
class _OnNode:
    """A hook of a node; `line`: where the user's code registered it."""

    hook: Any
    line: str
    handle: Any = None
    was_called: bool = False

    def __call__(self, *args: Any) -> Any:
        self.was_called = True
        return self.hook(*args)

    @property
    def is_there(self) -> bool:
        table = self.handle.hooks_dict_ref()
        return table is not None and self.handle.id in table


@dataclasses.dataclass(frozen=True, slots=True)
class RegisterHook(TensorEffect):
    """`register_hook()` on an input or a result."""

    hook: Any
    place = CallPlace.RESULTS
    rank = 4
    sees_gradients = True
    instead = "register the hook outside of the function"

    def lines(self, writer: EffectWriter) -> list[str]:
        return [f"{writer.target(self.target)}.register_hook({writer.bind('hook', self.hook)})"]

    def __str__(self) -> str:
        return f"register_hook() on {self.target}"


class OwnHooks(Aspect):
    """The hooks that one run registered on its own tensors, in their order.

    `inside`: positions of results with traced hooks. Each call registers the rest: on inputs (a hook there gets the
    gradients of all their uses), and on results.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._registered: list[_RegisteredHook] = []
        self._on_nodes: list[_OnNode] = []
        self._on_results: list[tuple[int, Callable[..., Any]]] = []
        self._on_inputs: list[tuple[InputRecord | OpenInput, Callable[..., Any]]] = []
        self.inside: list[int] = []

    def __bool__(self) -> bool:
        """Whether the backward runs hooks of the function's."""
        return bool(self._registered)

    def note(self, tensor: torch.Tensor, hook: Any, handle: Any) -> None:
        """`tensor.register_hook(hook)` gave `handle`."""
        self._registered.append(_RegisteredHook(tensor, hook, handle.id, history_of(tensor), self._line()))

    def on_node(self, hook: Any, register: Callable[[Any], Any]) -> Any:
        """Register a hook on a node."""
        noted = _OnNode(hook, self._line())
        table, noted.handle = register(noted)
        self._on_nodes.append(noted)
        return table, noted.handle

    def effects(self, run: Settled) -> list[RegisterHook]:
        """The hooks that each call registers."""
        on_inputs = [
            RegisterHook(EffectTarget(run.number[record], is_input=True), hook) for record, hook in self._on_inputs
        ]
        return [*on_inputs, *(RegisterHook(EffectTarget(at), hook) for at, hook in self._on_results)]

    def check_nodes(self, name: str) -> None:
        """After the backward: hooks of nodes that it did not reach but eager's backward may call.

        Raises:
            UnsupportedSideEffectError: there is one.
        """
        for noted in self._on_nodes:
            if noted.is_there and not noted.was_called:
                raise UnsupportedSideEffectError(
                    f"`{name}` puts a hook on an autograd node that is none of its own backward: the node of a view "
                    f"that it returns, or of a leaf.\n  registered at {noted.line}\n  Put the hook on a tensor "
                    "(`register_hook`), or on the node of a result, after the call."
                )

    def settle(
        self, name: str, function: Any, results: Sequence[Any], returned: Returned, inputs: Inputs, *, live: bool
    ) -> None:
        """Decide for each hook, before the backward is traced. `live`: calls can put hooks on tensors.

        Raises:
            UnsupportedSideEffectError: a hook is left on an input, or on a view, that can't take it.
        """
        for noted in self._on_nodes:
            noted.was_called = False  # by a gradient taken inside
        if not self._registered:
            return
        known: ById[Any, Any] = inputs.by_stand_in | inputs.wrappers.by_stand_in
        outside = outside_of(function)
        in_one_memory = inputs.apart.union(member for _, members in inputs.memory for member in members)
        for left in [noted for noted in self._registered if noted.tensor in known and _is_there(noted)]:
            record = known[left.tensor]
            is_plain = record.real.requires_grad and not is_moved(record) and record not in in_one_memory
            if not (live and is_plain and needs_nothing(left.hook, outside)) or _names_containers(left.hook):
                raise UnsupportedSideEffectError(
                    f"`{name}` puts a hook on a tensor from outside (an argument, a parameter), where it stays and is "
                    f"to see the gradients of other uses too.\n  registered at {left.line}\n  Put it there outside the "
                    "compiled function, or on `y = x.view_as(x)` and use that."
                )
            self._on_inputs.append((record, left.hook))
            self._take_back(left)
        positions = ById((t, at) for at, t in reversed(list(enumerate(results))) if is_stand_in(t))
        fakes = [*returned.graph.carrying_gradients().values()]
        passed, passed_aliases = passed_through(fakes, returned.aliases(results))
        interior = IdSet([*(fakes[at] for at, _ in passed), *(results[at] for at, _ in passed_aliases)])
        for tensor, at in positions.items():
            hooks = [r for r in self._registered if r.tensor is tensor and _is_there(r)]
            if not hooks or tensor in known:
                continue
            if live and tensor not in interior and all(needs_nothing(r.hook, outside) for r in hooks):
                self._on_results += ((at, r.hook) for r in hooks)
                for registered in hooks:
                    self._take_back(registered)
            else:
                _check_view(name, returned.outputs[at])
                self.inside.append(at)

    def _take_back(self, registered: _RegisteredHook) -> None:
        del registered.tensor._backward_hooks[registered.key]  # type: ignore[union-attr]
        self._registered.remove(registered)


def _check_view(name: str, info: OutputInfo) -> None:
    if isinstance(info, Handle) and info.steps:
        raise UnsupportedSideEffectError(
            f"`{name}` puts a hook on the view {info.path} that it returns; the hook computes with tensors of "
            "the function, or further results are computed from the view. Return a copy of the view, or put the hook "
            "on the result after the call."
        )


def _is_there(registered: _RegisteredHook) -> bool:
    """Whether the hook was not removed, and is still the tensor's: a write in place leaves it with the former one."""
    hooks = registered.tensor._backward_hooks
    return hooks is not None and registered.key in hooks and history_of(registered.tensor) is registered.history


def _names_containers(hook: Any) -> bool:
    """Whether the code of a hook names lists and the like. Their items are guarded: a container that the hook adds to
    would make a graph for each call.
    """
    hook = _function(hook)
    if not isinstance(hook, types.FunctionType):
        return False
    cells = [cell.cell_contents for cell in hook.__closure__ or () if cell != types.CellType()]
    named = [hook.__globals__.get(name) for name in names_of(hook.__code__).loaded]
    return any(isinstance(value, (list, dict, set, collections.deque)) for value in (*cells, *named))


def outside_of(function: Any) -> IdSet[Any]:
    """A function's closed-over objects, inner functions included: cells, contents, objects of methods."""
    found: IdSet[Any] = IdSet()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if value in found:
            continue
        found.add(value)
        if isinstance(value, types.CellType):
            waiting += [value.cell_contents] if value != types.CellType() else []
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            waiting += [*(value.__closure__ or ()), getattr(value, "__self__", None)]
    return found


def needs_nothing(
    value: Any, outside: IdSet[Any], knows: Callable[[Any], bool] = lambda _: False, depth: int = 0
) -> bool:
    """Whether a hook and its contents hold nothing that the run made: tensors, symbolic numbers, lists.

    `knows`: whether a further object is certainly not of the run.
    """
    if is_stand_in(value) or is_symbolic(value) or depth > _DEEPEST_HELD:
        return False
    if value in outside or isinstance(value, (*_PLAIN, torch.Tensor, torch.nn.Module)):
        return True
    held: Iterable[Any]
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell not in outside]
        cells = [cell.cell_contents for cell in cells if cell != types.CellType()]
        held = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, functools.partial):
        held = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        held = (value.__self__, value.__func__)
    elif isinstance(value, types.BuiltinFunctionType):
        held = (value.__self__,)
    elif isinstance(value, tuple):
        held = value
    else:
        return type(value).__module__ == "torch._ops" or knows(value)  # an operator
    return all(needs_nothing(item, outside, knows, depth + 1) for item in held)
