"""Asks a tensor inside of a captured function for everything that there is on tensors: what differs from eager.

    python -m tests.parity.tensor_names argument     # one of `KINDS`, two of which the tests ask

Each attribute and method of `torch.Tensor`, and of its storages, and each of `ASKED`, is asked in a captured function:
the answer is eager's, or an error of foregrad's says by name why not. A process that ends tells the case last printed.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import gc
import io
import json
import math
import pickle
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

import foregrad
from foregrad.errors import ForegradError
from tests.covering import shared

__all__ = ["KNOWN", "differences"]

Kind = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# What is asked, made of an argument and a parameter.
KINDS: dict[str, Kind] = {
    "argument": lambda x, p: x,
    "result": lambda x, p: x * 2,
    "parameter": lambda x, p: p,
    "view": lambda x, p: (x * 2)[1:],
    "integers": lambda x, p: x.detach().long(),
    "number": lambda x, p: x[0, 1] * 2,
    "complex": lambda x, p: torch.complex(x, x + 1),
    "detached": lambda x, p: x.detach(),
}
# A number that is of the object, or of its place in memory: each call has another.
OF_THE_OBJECT = {"_cdata", "__hash__", "data_ptr", "_use_count", "_weak_ref", "__sizeof__", "_share_filename_cpu_"}
# End the interpreter, wait for ever or are of another device in eager as well.
LEFT_OUT = {"__class__", "__init_subclass__", "__dlpack_c_exchange_api__", "__annotations__", "__doc__", "index"}
# Of storages: end the process in eager, too.
UNSAFE = {
    "_weak_ref",
    "_free_weak_ref",
    "_release_ipc_counter",
    "_release_ipc_counter_cuda",
    "_new_with_weak_ptr",
    "_set_from_file",
    "_set_cdata",
    "_write_file",
}
MOST_CALLS = 1
# What differs, and why.
KNOWN = {
    "_python_dispatch": "private: whether operators come to a dispatch mode",
    "grad_fn of a written view": "autograd records the view's operators, which it does only where asked to",
    "make_fx": "the result has no history, as inside of a trace",
    "data set": "a view whose `.data` is set is no view of its base any more",
    "storage.__dir__": "the storage of a stand-in is of a class of its own, with the same attributes",
    "dequantize()": "of a tensor that is not quantised, which nobody needs",
}


def arguments_for(tensor: torch.Tensor) -> list[tuple[Any, ...]]:
    """What a method may take; the first that eager takes are used."""
    other = torch.ones_like(tensor.detach())
    index, mask = torch.zeros(tensor.shape, dtype=torch.int64), torch.ones(tensor.shape, dtype=torch.bool)
    return [
        (),
        (other,),
        (0,),
        (1.5,),
        (0, 0),
        (other, other),
        (0, index),
        (mask,),
        (mask, 1.0),
        (0, index, other),
        (0, 0, 1),
        (-1, 0, 1),
        (tuple(tensor.shape),),
        (torch.float64,),
        ("cpu",),
        (torch.Tensor,),
        (lambda value: value,),
        (other, lambda a, b: a),
        (None,),
        ([0],),
        (0, 1, 1),
        ("dtype",),
        (torch.float64, 0),
        ("marked", 3),
        ({},),
    ]


def _of_storage(name: str) -> Callable[[torch.Tensor], Any]:
    def asked(tensor: torch.Tensor) -> Any:
        found = getattr(tensor.untyped_storage(), name)
        return found() if callable(found) else found

    return asked


def _written_file(tensor: torch.Tensor) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        torch.save(tensor, file.name)
        return torch.load(file.name)


def _saved(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def _swapped(tensor: torch.Tensor) -> Any:
    other = torch.zeros(2)
    torch.utils.swap_tensors(tensor, other)
    return tensor, other


def _set_class(tensor: torch.Tensor) -> Any:
    tensor.__class__ = torch.nn.Parameter
    return isinstance(tensor, torch.nn.Parameter)


def _read_address(tensor: torch.Tensor) -> Any:
    return ctypes.string_at(tensor.data_ptr(), 4)


def _set_data(tensor: torch.Tensor) -> Any:
    tensor.data = torch.full((2,), 3.0, dtype=tensor.dtype)
    return tensor.detach() * 2


def _set_storage(tensor: torch.Tensor) -> Any:
    with torch.no_grad():
        return tensor.detach().set_(torch.ones(4, dtype=tensor.dtype).untyped_storage(), 0, (2,), (1,)) * 2


def _printed(tensor: torch.Tensor) -> Any:
    file = io.StringIO()
    print(tensor, file=file)
    return file.getvalue()


ASKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle of a list": lambda t: pickle.loads(pickle.dumps([t, t], protocol=2)),
    "fork": lambda t: len(ForkingPickler.dumps(t)) > 0,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy twice": lambda t: copy.deepcopy([t, t]),
    "deepcopy of detached": lambda t: copy.deepcopy(t.detach()),
    "deepcopy of data": lambda t: copy.deepcopy(t.data),
    "save": _saved,
    "save in a file": _written_file,
    "numpy": lambda t: t.numpy(),
    "numpy of detached": lambda t: t.detach().numpy(),
    "numpy by force": lambda t: t.numpy(force=True),
    "numpy of a clone": lambda t: t.detach().clone().numpy() + 1,
    "asarray": lambda t: np.asarray(t),
    "asarray of detached": lambda t: np.asarray(t.detach()),
    "array of a dtype": lambda t: np.array(t.detach(), dtype=np.complex128),
    "ufunc": lambda t: np.sin(t),
    "ufunc of detached": lambda t: np.add(t.detach(), 1),
    "from_numpy": lambda t: torch.from_numpy(t.detach().numpy()),
    "array operand": lambda t: np.ones(3) * t.detach(),
    "from_dlpack": torch.from_dlpack,
    "from_dlpack of detached": lambda t: torch.from_dlpack(t.detach()),
    "to_dlpack": lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())),
    "numpy.from_dlpack": lambda t: np.from_dlpack(t.detach()),
    "as_tensor": torch.as_tensor,
    "asarray of torch": torch.asarray,
    "tensor": lambda t: torch.tensor(t),
    "tensor of a list": lambda t: torch.tensor([[t.sum(), 1.0]]),
    "Tensor": lambda t: torch.Tensor(t),
    "FloatTensor": lambda t: torch.FloatTensor(t),
    "FloatTensor of detached": lambda t: torch.FloatTensor(t.detach()),
    "new": lambda t: t.new(t),
    "Tensor of storage": lambda t: torch.FloatTensor(t.untyped_storage()),
    "tensor of storage": lambda t: torch.tensor([], dtype=t.dtype).set_(t.untyped_storage()),
    "Parameter": lambda t: torch.nn.Parameter(t),
    "Parameter of detached": lambda t: torch.nn.Parameter(t.detach()) * 2,
    "Buffer": lambda t: torch.nn.Buffer(t),
    "frombuffer": lambda t: torch.frombuffer(t.detach().numpy(), dtype=t.dtype),
    "memoryview": lambda t: bytes(memoryview(t.detach().numpy())),
    "class set": _set_class,
    "data set": _set_data,
    "storage set": _set_storage,
    "swap": _swapped,
    "read by address": _read_address,
    "address": lambda t: (t.data_ptr() == t.view_as(t).data_ptr(), t.data_ptr() == 0),
    "address of the storage": lambda t: (
        t.untyped_storage().data_ptr() == t.detach().untyped_storage().data_ptr(),
        t.untyped_storage().data_ptr() == 0,
    ),
    "same storage": lambda t: t.untyped_storage()._cdata == t.detach().untyped_storage()._cdata,
    "storage is": lambda t: t.untyped_storage() is t.untyped_storage(),
    "storage ==": lambda t: t.untyped_storage() == t.untyped_storage(),
    "typed storage": lambda t: t.storage().tolist(),
    "typed storage's item": lambda t: t.storage()[0],
    "typed storage's type": lambda t: (t.storage().type(), t.storage().dtype, len(t.storage()), t.storage().device),
    "typed storage copied": lambda t: t.storage().clone().tolist(),
    "storage copied": lambda t: t.untyped_storage().clone().tolist(),
    "storage deep copied": lambda t: copy.deepcopy(t.untyped_storage()).tolist(),
    "storage pickled": lambda t: pickle.loads(pickle.dumps(t.untyped_storage())).tolist(),
    "storage filled": lambda t: (t.untyped_storage().fill_(0), t)[1],
    "storage's item set": lambda t: (t.untyped_storage().__setitem__(0, 7), t)[1],
    "storage resized": lambda t: (t.detach().clone().untyped_storage().resize_(256), t)[1],
    "storage sliced": lambda t: t.untyped_storage()[0:4].tolist(),
    "storage moved": lambda t: t.untyped_storage().to("cpu").nbytes(),
    "storage written": lambda t: (t.untyped_storage().copy_(torch.zeros(64).untyped_storage()[: 4 * 6]), t)[1],
    "share_memory_": lambda t: t.detach().clone().share_memory_().is_shared(),
    "is_shared": lambda t: t.is_shared(),
    "repr": repr,
    "str": str,
    "format": lambda t: f"{t}",
    "format of a number": lambda t: f"{t.detach().sum().item():.3f} {t.detach().sum():.3f}",
    "print": _printed,
    "text of a list": lambda t: repr([t]),
    "text of the storage": lambda t: repr(t.untyped_storage()),
    "list": list,
    "tolist": lambda t: t.tolist(),
    "unpacked": lambda t: [*t],
    "max": lambda t: max(t.flatten()),
    "sorted": lambda t: sorted(t.detach().flatten().tolist()),
    "float": lambda t: float(t.sum()),
    "math": lambda t: math.sin(t.sum()),
    "index": lambda t: [10, 20, 30][t.long().sum() % 3],
    "range": lambda t: list(range(t.long().abs().sum())),
    "in": lambda t: 0 in t,
    "hash": lambda t: {t: 3}[t],
    "id": lambda t: id(t) == id(t.view_as(t)),
    "eq": lambda t: t == t,
    "is": lambda t: t.detach() is t,
    "weakref": lambda t: weakref.ref(t)() is t,
    "weak keys": lambda t: torch.utils.weak.WeakTensorKeyDictionary({t: 3})[t],
    "referents": lambda t: len(gc.get_referents(t)) > 20,
    "getsizeof": lambda t: sys.getsizeof(t.untyped_storage()),
    "type": lambda t: (type(t), t.__class__, type(t.data), type(t.detach()), type(t * 2)),
    "type()": lambda t: (t.type(), t.detach().type(torch.float64)),
    "typename": torch.typename,
    "is_tensor": lambda t: (torch.is_tensor(t), isinstance(t, torch.nn.Parameter), isinstance(t, torch.FloatTensor)),
    "is_storage": lambda t: torch.is_storage(t.untyped_storage()),
    "predicates": lambda t: (torch.is_floating_point(t), torch.is_complex(t), torch.is_nonzero(t.detach().abs().sum())),
    "same_size": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "assert_close": lambda t: torch.testing.assert_close(t, t),
    "vars": lambda t: dict(vars(t)),
    "__dict__": lambda t: t.__dict__,
    "dir": lambda t: [name for name in dir(t) if "fake" in name or "foregrad" in name],
    "attribute set": lambda t: (setattr(t, "marked", 3), t.marked, hasattr(t, "unmarked"))[1:],
    "attribute deleted": lambda t: (setattr(t, "marked", 3), delattr(t, "marked"), hasattr(t, "marked"))[2],
    "grad": lambda t: t.grad,
    "grad set": lambda t: (setattr(t, "grad", None), t.grad)[1],
    "grad_fn": lambda t: type(t.grad_fn).__name__,
    "grad_fn of a view": lambda t: type(t.flatten().grad_fn).__name__,
    "grad_fn of a written view": lambda t: type((t * 1).flatten().mul_(2).grad_fn).__name__,
    "next functions": lambda t: [type(f).__name__ for f, _ in getattr((t * 2).grad_fn, "next_functions", ())],
    "saved": lambda t: getattr((t * t).grad_fn, "_saved_self", None),
    "base": lambda t: (t._base is None, t.flatten()._base is t),
    "version": lambda t: (t._version, t.detach().add_(1)._version),
    "collate": lambda t: torch.utils.data.default_collate([t, t]),
    "checkpoint": lambda t: torch.utils.checkpoint.checkpoint(torch.sin, t, use_reentrant=False),
    "pytree": lambda t: torch.utils._pytree.tree_map(lambda v: v * 2, {"a": [t]}),
    "parameters_to_vector": lambda t: torch.nn.utils.parameters_to_vector([t]),
    "as_subclass": lambda t: t.as_subclass(torch.nn.Parameter),
    "as_subclass of Tensor": lambda t: t.as_subclass(torch.Tensor) * 2,
    "_make_subclass": lambda t: torch.Tensor._make_subclass(torch.Tensor, t.detach(), True),
    "_make_subclass of Parameter": lambda t: torch.Tensor._make_subclass(torch.nn.Parameter, t.detach()),
    "__new__": lambda t: torch.Tensor.__new__(torch.Tensor, t),
    "_make_wrapper_subclass": lambda t: type(torch.Tensor._make_wrapper_subclass(torch.Tensor, t.shape)).__name__,
    "as_strided": lambda t: torch.as_strided(t, (1,), (1,)),
    "unbind": lambda t: torch.unbind(t.flatten()),
    "out": lambda t: torch.sin(t.detach(), out=torch.empty_like(t)),
    "jit": lambda t: torch.jit.trace(torch.sin, t.detach())(t),
    "script": lambda t: _scripted(t),
    "fx": lambda t: torch.fx.symbolic_trace(torch.nn.ReLU())(t),
    "make_fx": lambda t: torch.fx.experimental.proxy_tensor.make_fx(torch.sin)(t.detach())(t),
    "torch.compile": lambda t: torch.compile(torch.sin, backend="eager")(t),
    "vmap": lambda t: torch.vmap(torch.sin)(t.flatten()),
    "func.grad": lambda t: torch.func.grad(lambda v: v.sin().sum())(t.detach()),
    "jvp": lambda t: torch.func.jvp(torch.sin, (t.detach(),), (t.detach(),)),
    "autograd.grad": lambda t: torch.autograd.grad((t * t).sum(), t, retain_graph=True),
    "sparse": lambda t: t.detach().to_sparse().to_dense(),
    "nested": lambda t: torch.nested.nested_tensor([t.detach()]).size(0),
    "quantized": lambda t: torch.quantize_per_tensor(t.detach(), 0.1, 0, torch.quint8).dequantize(),
    "mkldnn": lambda t: t.detach().to_mkldnn().to_dense(),
    "meta": lambda t: t.to("meta").shape,
    "cpp": lambda t: torch._C._nn.gelu(t),
    "dispatch keys": lambda t: torch._C._dispatch_keys(t).has(torch._C.DispatchKey.CPU),
    "interface": lambda t: t.__array_interface__,
    "cuda interface": lambda t: t.__cuda_array_interface__,
    "dlpack device": lambda t: t.__dlpack_device__(),
    "reduce": lambda t: t.__reduce_ex__(2)[0].__name__,
    "state": lambda t: t.__getstate__() if sys.version_info >= (3, 11) else None,
    "hooks": lambda t: (t._backward_hooks, t._post_accumulate_grad_hooks),
    "names": lambda t: (t.names, t.has_names()),
    "renamed": lambda t: t.detach().rename(None),
}
_scripted = torch.jit.script(torch.nn.ReLU())


def _described(value: Any, mine: list[torch.Tensor]) -> Any:
    """A value as text, or lists of it, that two calls can be compared by."""
    if isinstance(value, torch.Tensor):
        is_which = [value is tensor for tensor in mine]
        layout = (type(value).__name__, str(value.dtype), tuple(value.shape), str(value.layout), str(value.device))
        is_view = value.requires_grad and value.layout is torch.strided and value._is_view()
        history = (value.requires_grad, value.is_leaf, is_view)
        if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
            return layout, history, is_which
        return layout, value.stride(), value.storage_offset(), history, is_which, repr(value.detach().tolist())
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, repr(value.tolist())
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        return type(value).__name__, str(value.device), value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_described(item, mine) for item in value]
    if isinstance(value, dict):
        return "dict", [(repr(key), _described(item, mine)) for key, item in value.items()]
    if value is None or isinstance(value, (int, float, complex, str, bytes, type, torch.dtype, torch.device)):
        return repr(value)
    return type(value).__name__


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([[0.5, 1.0, 2.0], [0.25, 3.0, 1.5]], requires_grad=True)
    return x, torch.nn.Parameter(torch.tensor([[1.0, 0.5, 0.25], [2.0, 1.0, 4.0]]))


Asked = Callable[[torch.Tensor], Any]


def _attribute(name: str, call: tuple[Any, ...] | None) -> Asked:
    def asked(tensor: torch.Tensor) -> Any:
        found = getattr(tensor, name)
        return found if call is None else found(*call)

    return asked


def cases(kind: str) -> Iterator[tuple[str, Asked]]:
    """What is asked, and under what name it is told: every name of an argument, every second one of others."""
    for name in shared(sorted(set(dir(torch.Tensor)) - LEFT_OUT), 0, 1 if kind == "argument" else 2):
        if not callable(getattr(torch.Tensor, name)):
            yield name, _attribute(name, None)
            continue
        found = 0
        for number, call in enumerate(arguments_for(KINDS[kind](*_inputs()))):
            if found < MOST_CALLS and (number == 0 or _takes(kind, _attribute(name, call))):
                found += number > 0 or _takes(kind, _attribute(name, call))
                yield f"{name}{tuple(type(item).__name__ for item in call)}", _attribute(name, call)
    for name in sorted(set(dir(torch.UntypedStorage)) - LEFT_OUT - UNSAFE):
        if name != "_cdata":
            yield f"storage.{name}", _of_storage(name)
    yield from ASKED.items()


def _takes(kind: str, asked: Asked) -> bool:
    try:
        asked(KINDS[kind](*_inputs()))
    except Exception:
        return False
    return True


def _outcome(function: Any, name: str) -> Any:
    """What a call gives and leaves, as text; an error of foregrad's is None."""
    torch.default_generator.manual_seed(0)
    x, p = _inputs()
    try:
        result, tensor, after = function(x, p)
    except ForegradError:
        return None
    except Exception as error:
        return f"raises {type(error).__name__}"
    mine = [x, p, tensor]
    root = name.partition("(")[0].removeprefix("storage.")
    told = type(result).__name__ if root in OF_THE_OBJECT else _described(result, mine)
    return [told, *(_described(each, mine) for each in (tensor, after, x, p))]


def _difference(outcome: Any, expected: Any) -> str:
    if isinstance(outcome, str) or isinstance(expected, str):
        return f"{outcome if isinstance(outcome, str) else 'a result'}, not {expected}"
    parts = zip(("result", "tensor", "sum", "x", "p"), outcome, expected, strict=True)
    return "; ".join(f"{part} {got}, not {wanted}" for part, got, wanted in parts if got != wanted)


def differences(kind: str, only: str | None = None) -> list[str]:
    """The cases of a kind of tensor whose answer is not eager's and that no error names."""
    found = []
    for name, asked in cases(kind):
        if only is not None and only != name:
            continue
        print(json.dumps(name), flush=True)

        def function(x: torch.Tensor, p: torch.Tensor, asked: Asked = asked) -> Any:
            tensor = KINDS[kind](x, p)
            result = asked(tensor)
            return result, tensor, (x.detach() + p.detach()) * 2

        expected = _outcome(function, name)
        compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
        for _ in range(2):
            outcome = _outcome(compiled, name)
            if outcome is None:  # refused: the second call would be captured, and refused, as the first was
                break
            if outcome != expected:
                found.append(f"{name}: {_difference(outcome, expected)}")
                break
    return found


def main() -> int:
    """Print what differs."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = differences(sys.argv[1], *sys.argv[2:3])
    print("\n".join(["", *found]))
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
