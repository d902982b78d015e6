"""A program on disk that shows a fault by itself: a small graph, its inputs, and the comparison.

It needs PyTorch, and the backend or decomposition that is at fault. Inputs are random numbers of a seed, in the range
of the real ones, where these show the fault; else the real ones, in a file beside the program.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from foregrad.extend import is_house_module
from foregrad.graph.printing import print_graph

from .compare import Gap, Verdict
from .locate import Culprit, Piece, gap_of
from .lockstep import evaluate, exact_call
from .search import Maker, made_gap, run_in_halves, run_with_gradients


def write_reproducer(culprit: Culprit, backend: str, folder: str | None, *, tries: bool = True) -> str | None:
    """Write the program for a culprit that has a piece; its path. None where it can't be written.

    `tries`: whether random inputs are tried first, for a culprit that can run; else the real inputs are stored.
    """
    if culprit.piece is None:
        return None
    place = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="foregrad_verify_"))
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"reproduce_{''.join(c if c.isalnum() else '_' for c in culprit.node)}.py"
    piece, gap = _with_plain_inputs(culprit) if tries else (culprit.piece, culprit.gap)
    seeded = piece is not culprit.piece
    inputs = _seeded(piece.inputs) if seeded else _stored(piece.inputs, path)
    path.write_text(_program(culprit, piece, gap, inputs, backend), encoding="utf-8")
    return str(path)


# ---------------------------------------------------------------- inputs


def _with_plain_inputs(culprit: Culprit) -> tuple[Piece, Gap]:
    """The piece with random inputs, where these show the fault too; and how its results differ."""
    assert culprit.piece is not None
    try:
        piece = dataclasses.replace(culprit.piece, inputs=_drawn(culprit.piece.inputs))
        gap = _gap(culprit, piece)
    except Exception:  # these inputs are not right for the operators
        return culprit.piece, culprit.gap
    return (culprit.piece, culprit.gap) if gap is None else (piece, gap)


def _gap(culprit: Culprit, piece: Piece) -> Gap | None:
    if culprit.replacement is None:
        return made_gap(piece, culprit.maker)
    if piece.generators is not None:
        piece.generators.put_back()
    expected = evaluate(piece.module, piece.inputs)
    call = next(node for node in piece.module.graph.nodes if node.op == "call_function")
    values = dict(zip((n for n in piece.module.graph.nodes if n.op == "placeholder"), piece.inputs, strict=True))
    args, kwargs = (fx.map_arg(a, values.__getitem__) for a in (call.args, call.kwargs))
    if piece.generators is not None:
        piece.generators.put_back()
    with torch.no_grad():
        actual = culprit.replacement(*args, **kwargs)
        value = expected[0] if isinstance(actual, torch.Tensor) else expected
        gap = gap_of(actual, value, lambda: exact_call(call.target, args, kwargs, value))
    return gap if gap.verdict is Verdict.WRONG else None


def _drawn(values: Sequence[Any]) -> list[Any]:
    """The values that `_seeded` writes, made here."""
    torch.manual_seed(0)
    return [eval(_input(value), {"torch": torch}) if isinstance(value, torch.Tensor) else value for value in values]


def _input(value: torch.Tensor) -> str:
    """An expression for a random tensor like this one."""
    return _drawing(value) + ".requires_grad_()" * value.requires_grad


def _drawing(value: torch.Tensor) -> str:
    empty = (
        f"torch.empty_strided({tuple(value.shape)}, {tuple(value.stride())}, dtype={value.dtype}, "
        f"device={str(value.device)!r})"
    )
    if value.numel() == 0:
        return empty
    if value.dtype is torch.bool:
        return f"{empty}.bernoulli_(0.5)"
    if value.is_complex():
        return f"{empty}.normal_()"
    low, high = (float(number) for number in value.detach().double().nan_to_num(0, 0, 0).aminmax())
    if value.is_floating_point():
        return f"{empty}.uniform_({low:.6g}, {high:.6g})"
    return f"{empty}.random_({int(low)}, {int(high) + 1})"


def _seeded(values: Sequence[Any]) -> str:
    lines = [_input(value) if isinstance(value, torch.Tensor) else repr(value) for value in values]
    return "torch.manual_seed(0)\ninputs = [\n" + "".join(f"    {line},\n" for line in lines) + "]\n"


def _plain(value: torch.Tensor) -> torch.Tensor:
    """The elements as the file's format has them: dense, real, without aliases."""
    value = value if value.layout is torch.strided else value.to_dense()
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return real.resolve_neg().clone(memory_format=torch.contiguous_format)


def _stored(values: Sequence[Any], path: Path) -> str:
    """The values themselves, in a file beside the program."""
    from safetensors.torch import save_file

    tensors = {f"x{i}": _plain(v.detach()) for i, v in enumerate(values) if isinstance(v, torch.Tensor)}
    file = path.with_suffix(".safetensors")
    save_file(tensors, str(file))
    lines = []
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            stored = f"torch.view_as_complex(stored['x{i}'])" if value.is_complex() else f"stored['x{i}']"
            if value.layout is torch.strided:
                empty = f"torch.empty_strided({tuple(value.shape)}, {tuple(value.stride())}, dtype={value.dtype})"
                stored = f"{empty}.copy_({stored})"
            else:
                stored = f"{stored}.to_sparse(layout={value.layout})"
            lines.append(f"{stored}.to({str(value.device)!r}){'.requires_grad_()' * value.requires_grad}")
        else:
            lines.append(repr(value))
    listed = "".join(f"    {line},\n" for line in lines)
    return (
        "from pathlib import Path\n\nfrom safetensors.torch import load_file\n\n"
        f"stored = load_file(Path(__file__).parent / {file.name!r})\ninputs = [\n{listed}]\n"
    )


# ---------------------------------------------------------------- the program


def _program(culprit: Culprit, piece: Piece, gap: Gap, inputs: str, backend: str) -> str:
    graph = print_graph(piece.module, name="graph") + _constants(piece.module)
    whose = "its decomposition" if culprit.maker is None else _WHOSE[culprit.maker.kind].format(backend)
    said = f"{culprit.operator}: {whose} differs from {'eager' if whose == _WHOSE['capture'] else 'its kernel'}. {gap}"
    expected, allowed = "graph(*inputs)", gap.allowed if gap.allowed is not None else 0.0
    if culprit.replacement is not None:
        replaced = _replaced(piece.module)
        graph += f"\n\n{replaced}"
        definition = f"{_found(culprit.replacement, 'decomposition', None)}\n"
        actual = "decomposed(*inputs, decomposition=decomposition)"
    elif culprit.maker.kind == "capture":
        definition = f"import foregrad  # noqa: E402\n\n{_ANY}{inspect.getsource(run_with_gradients)}\n\n"
        definition += (
            'compiled = foregrad.compile(graph, backend="eager", partition="default", on_unsupported="raise")\n'
        )
        expected, actual = "run_with_gradients(graph, inputs)", "run_with_gradients(compiled, inputs)"
    else:
        definition = _made(culprit.maker, backend)
        actual = "call(compiled, list(inputs))"
    seed = "torch.manual_seed(0)\n" if piece.generators is not None else ""
    return (
        f'"""{_wrapped(said)}\n\n'
        'Made by foregrad.verify. Exits with 1 while the results differ by more than rounding.\n"""\n\n'
        f"import sys\n\n{graph}\n\n{inputs}\n{definition}\n{seed}expected = {expected}\n{seed}actual = {actual}\n"
        f"{_COMPARED.format(allowed=allowed)}"
    )


def _constants(module: fx.GraphModule) -> str:
    """The lines that give a printed graph the tensors that it reads of its module."""
    names = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    tensors = {name: value for name in names if isinstance(value := getattr(module, name, None), torch.Tensor)}
    if not tensors or len(tensors) != len(names):
        return ""
    lines = "".join(f"    {name} = {_constant(value)}\n" for name, value in tensors.items())
    return (
        f"\n\nclass Constants:\n{lines}\n\nof_constants = graph\n\n\n"
        "def graph(*inputs):\n    return of_constants(Constants, *inputs)\n"
    )


def _constant(value: torch.Tensor) -> str:
    """An expression for a tensor; for a large one, of random numbers in its range."""
    if value.numel() > _MOST_NUMBERS or value.layout is not torch.strided:
        return _drawing(value)
    return f"torch.tensor({value.tolist()}, dtype={value.dtype}, device={str(value.device)!r})"


_MOST_NUMBERS = 64

_WHOSE = {
    "compiler": "the backend {}",
    "passes": "a pass of the backend {}",
    "partition": "the graph that the partition split",
    "capture": "the captured program",
}

_ANY = "from typing import Any  # noqa: E402\n\n\n"

_COMPILED = """

def call(compiled, values):
    if isinstance(compiled, torch.fx.GraphModule):
        compiled.recompile()  # a compiler may have changed its graph alone
    results = compiled(values) if getattr(compiled, "_boxed_call", False) else compiled(*values)
    return list(results) if isinstance(results, (list, tuple)) else [results]


from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

module = make_fx(graph, tracing_mode="fake")(*inputs)
compiled = """


def _made(maker: Maker, backend: str) -> str:
    """The lines that make `compiled` of the graph."""
    if maker.kind == "passes":
        passes = maker.function.__self__.prepare_joint  # type: ignore[attr-defined]  # the pipeline's
        return f"{_found(passes, 'passes', backend, 'prepare_joint')}{_COMPILED}passes(module)\n"
    if maker.kind == "partition":
        halves = f"{_ANY}{inspect.getsource(run_in_halves)}"
        return f"{_found(maker.function, 'partition', None)}\n{halves}{_COMPILED}run_in_halves(partition, module)\n"
    inputs = '[node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]'
    return f"{_found(maker.function, 'compiler', backend)}{_COMPILED}compiler(module, {inputs})\n"


_COMPARED = """
differ = False
for number, (is_, should) in enumerate(zip(actual, expected, strict=True)):
    if is_.shape != should.shape or is_.dtype != should.dtype:
        print(f"result {{number}}: {{is_.dtype}}{{list(is_.shape)}}, expected {{should.dtype}}{{list(should.shape)}}")
        differ = True
        continue
    off = (is_.double() - should.double()).abs().max().item() if should.numel() else 0.0
    print(f"result {{number}}: off by up to {{off:.6g}}; rounding allows {allowed:.6g}")
    differ |= not off <= {allowed!r}
sys.exit(1 if differ else 0)
"""


class _Decomposition:
    """Stands in a printed graph for its argument."""

    __name__ = "decomposition"

    def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return "in place of the operator"


def _replaced(module: fx.GraphModule) -> str:
    """The graph with the decomposition in place of the operator."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    call = next(node for node in graph.nodes if node.op == "call_function")
    call.target = _Decomposition()
    text = print_graph(graph, name="decomposed")
    return text[text.index("def decomposed") :]


def _wrapped(text: str) -> str:
    return textwrap.fill(text.replace("\\", "/").replace('"""', "'''"), 116)


def _found(value: Any, name: str, backend: str | None, part: str = "inference_compiler") -> str:
    """The lines that fetch a function of somebody else's, or say that they can't."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    is_ours = is_house_module(module or type(value).__module__)
    if backend is not None and (is_ours or qualified is None):
        return f"import foregrad\n\n{name} = foregrad.get_backend({backend!r}).{part}\n"
    if module is None or qualified is None or "<" in qualified or module == "__main__":
        text = _source_of(value, name)
        if text is not None or qualified is None or "<" in qualified:
            return text or f"raise SystemExit('put the {name} here: it has no name to import it by')\n{name} = None\n"
    root, _, rest = qualified.partition(".")
    tail = f"\n{name} = {root}.{rest}\n" if rest else ""
    imported = f"from {module} import {root}" + ("" if rest else f" as {name}") + "\n" + tail
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    libraries = tuple(sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib"))
    if file is None or str(file).startswith(libraries) or is_ours:
        return imported
    path = os.path.abspath(file)
    dotted = str(module).replace(".", os.sep)
    if module != "__main__" and path.endswith((f"{dotted}.py", f"{dotted}{os.sep}__init__.py")):
        return f"sys.path.insert(0, {path[: path.rindex(dotted)]!r})\n{imported}"
    return (
        "import importlib.util\n\n"
        f"spec = importlib.util.spec_from_file_location('at_fault', {path!r})\n"
        "at_fault = sys.modules['at_fault'] = importlib.util.module_from_spec(spec)\n"
        f"spec.loader.exec_module(at_fault)\n{name} = at_fault.{qualified}\n"
    )


def _source_of(value: Callable[..., Any], name: str) -> str | None:
    """The text of a function that needs nothing but modules besides; None of any other."""
    code, variables = getattr(value, "__code__", None), getattr(value, "__globals__", {})
    if code is None or code.co_freevars:
        return None
    used = {word: variables[word] for word in code.co_names if word in variables}
    if not all(inspect.ismodule(module) for module in used.values()):
        return None
    try:
        text = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return None
    if not text.startswith("def "):
        return None
    imports = "".join(f"import {module.__name__} as {word}\n" for word, module in used.items() if word != "torch")
    return f"{imports}\n\n{text}\n\n{name} = {value.__name__}\n"
