"""What a newcomer meets in a notebook, in a real kernel (`foregrad[notebook]`, which `make test` installs)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CELLS = {
    "start": """
        import torch, foregrad
        x = torch.ones(3, requires_grad=True)
        foregrad.config.background = False
    """,
    "function": """
        def helper(x): return x.sin()
        def f(x): return helper(x).sum()
        c = foregrad.compile(f, backend="eager")
        print(torch.equal(c(x), f(x)))
    """,
    "callee defined anew": """
        def helper(x): return x.cos()
        print(torch.equal(c(x), f(x)))
    """,
    "recompiles": "foregrad.explain_recompiles(c)",
    "slow": """
        import time
        def compiler(graph, inputs):
            time.sleep(2.5)
            return graph.forward
        _ = foregrad.compile(lambda x: (x * 2).sum(), backend=(compiler, compiler))(x)
    """,
    "report": 'foregrad.explain(f, x, backend="eager", measure=False)',
    "verification": 'foregrad.verify(f, x, backend="eager")',
    "compiled module": 'foregrad.compile(torch.nn.Linear(2, 2), backend="eager")',
    "error": """
        def bad(x):
            return x @ torch.ones(7, 7)
        foregrad.compile(bad, backend="eager")(x)
    """,
    "eager by name": """
        def seeds(x):
            torch.manual_seed(0)
            return x * 2
        s = foregrad.compile(seeds, backend="eager")
        _ = s(x)
    """,
    "eager calls": "foregrad.explain_recompiles(s)",
    "autoreload": """
        import pathlib, sys
        pathlib.Path("reloaded.py").write_text("def h(x): return x * 2\\n")
        sys.path.insert(0, "")
        %load_ext autoreload
        %autoreload 2
        import reloaded
        r = foregrad.compile(lambda x: reloaded.h(x).sum(), backend="eager")
        print(r(x).item())
    """,
    "file changed": 'time.sleep(1.1); _ = pathlib.Path("reloaded.py").write_text("def h(x): return x * 500\\n")',
    "reloaded": "print(r(x).item(), foregrad.explain_recompiles(r))",
}


RUN = """
import nbclient, nbformat, sys
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300, allow_errors=True).execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The outputs of each cell, by its name. The client runs apart: it leaves sockets to the garbage collector."""
    path = tmp_path_factory.mktemp("notebook") / "cells.ipynb"
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(text).strip()) for text in CELLS.values()]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FOREGRAD_")}
    command = [sys.executable, "-c", RUN, str(path)]
    subprocess.run(command, cwd=path.parent, env=plain, check=True, capture_output=True)
    notebook = nbformat.read(path, 4)
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def text_of(outputs, stream=None):
    found = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs
             if stream is None or out.get("name") == stream]  # fmt: skip
    return "".join(found)


def number(name):
    return list(CELLS).index(name) + 1


def test_a_function_defined_anew_in_a_later_cell_is_used(shown):
    assert text_of(shown["function"], "stdout") == "True\n"
    assert text_of(shown["callee defined anew"], "stdout") == "True\n"


def test_recompiles_name_the_cells(shown):
    said = text_of(shown["recompiles"])
    assert re.search(rf"helper was helper of In ?\[{number('function')}\]:1", said)
    assert re.search(rf"is helper of In ?\[{number('callee defined anew')}\]:1", said)


def test_progress_is_shown_without_being_asked_for(shown):
    assert "foregrad: compiling `<lambda>`" in text_of(shown["slow"], "stderr")


def test_the_report_is_the_page_in_a_frame(shown):
    (out,) = (out for out in shown["report"] if out.output_type == "execute_result")
    assert "<iframe" in out.data["text/html"]
    assert "Memory over the step" in out.data["text/html"]


def test_results_are_shown_as_their_reports(shown):
    assert text_of(shown["verification"]).startswith("f, compiled with eager, against eager")
    assert text_of(shown["compiled module"]).startswith("foregrad.compile(Linear(")


def test_foregrads_frame_is_not_in_the_traceback_of_the_functions_error(shown):
    (out,) = (out for out in shown["error"] if out.output_type == "error")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(out.traceback))
    assert "dispatcher.py" not in text
    assert re.search(r"in bad\(x\)", text)


def test_warnings_and_counts_of_eager_calls_name_the_cell(shown):
    place = rf"In ?\[{number('eager by name')}\]:2 in seeds"
    assert re.search(place, text_of(shown["eager by name"], "stderr"))
    said = text_of(shown["eager calls"])
    assert re.search(place, said)
    assert "ipykernel" not in said


def test_a_module_that_autoreload_replaced_is_used_and_named(shown):
    assert text_of(shown["autoreload"], "stdout") == "6.0\n"
    said = text_of(shown["reloaded"], "stdout")
    assert said.startswith("1500.0 ")
    assert re.search(r"h.__code__ was code of reloaded.py:1, is another object", said)
