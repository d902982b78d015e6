"""One page's examples in a process of their own: `python -m tests.front_door.examples PAGE [BACKEND]`.

`PAGE` is README.md, a page in docs/ or a program in examples/. Its blocks of Python are run in order, in one namespace, as
`make docs` runs them. With `BACKEND`, wherever it says `backend="eager"` that one is used, or with `default` none is named;
what is promised bit for bit is then only compared in kind, because numbers drawn by Inductor are others.
Exits with 0 when all of it runs, and nothing was said about doing without Inductor.
"""

from __future__ import annotations

import logging
import re
import runpy
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from .one import Heard

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(?P<code>(?:(?!```).*\n)+)```")


def pages() -> list[str]:
    """The pages and programs with examples to run."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        *(str(path.relative_to(ROOT)) for path in documents if program_of(path)),
        *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").glob("*.py"))),
    ]


def program_of(path: Path) -> str:
    """The blocks of Python on a page that are programs: a printed graph is not one, and has no name for itself."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    printed = {match.end() for match in re.finditer(r"<!-- output -->\n```\w*\n", text)}
    return "\n".join(match["code"] for match in BLOCK.finditer(text) if match.start("code") not in printed)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of the same kind, and both of numbers."""
    return a.shape == b.shape and a.dtype is b.dtype and bool((a + b).isfinite().all())


def main(page: str, backend: str = "") -> int:
    source = program_of(ROOT / page)
    if backend:
        named = "" if backend == "default" else f'backend="{backend}"'
        source = re.sub(r',\s*backend="eager"', f", {named}" if named else "", source)
        source = source.replace('backend="eager"', named)
        torch.equal = alike
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"`?torch\.jit\.[a-z_]+`? is (deprecated|not supported)", DeprecationWarning)
    heard = Heard()
    logging.getLogger("foregrad").addHandler(heard)
    logging.getLogger("foregrad").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "example.py"
        program.write_text(source, encoding="utf-8")
        sys.argv = [str(program)]
        runpy.run_path(str(program), run_name="__main__")
    assert not heard.of_doing_without(), heard.messages
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
