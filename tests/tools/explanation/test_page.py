"""The HTML report: one file that needs nothing else, whole and quick in a real browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import pytest
import torch
from torch import nn

import foregrad
from foregrad.partitioners.report import in_bytes

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=8000""".split()


def in_browser(path, folder, size="1400,1000", fragment="", flags=()):
    """(the page as it is once its script has run, what the console said)."""
    command = [BROWSER, *FLAGS, *flags, f"--window-size={size}", f"--user-data-dir={folder}", "--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{path}{fragment}"], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    return re.sub(r"<script>.*?</script>", "", done.stdout, flags=re.DOTALL), [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    pytest.importorskip("transformers")
    from benchmarks.models import build

    module, args, kwargs = build("gpt2-24")
    found = foregrad.explain(module, *args, backend="eager", measure=False, **kwargs)
    return found, found.save(tmp_path_factory.mktemp("report") / "gpt2.html")


def small():
    torch.manual_seed(0)
    return foregrad.explain(
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(64, 16), backend="eager",
        partition=foregrad.nothing_saveable,
    )  # fmt: skip


def test_the_page_needs_nothing_else(gpt2):
    _, path = gpt2
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 5e6
    outside = re.findall(r"""(?:src|href)=["']?([^"'> ]+)|url\(([^)]+)\)|@import""", text)
    assert {found for pair in outside for found in pair if found and not found.startswith(("#", "data:"))} == set()
    assert "fetch(" not in text
    assert "prefers-color-scheme: dark" in text


def test_what_the_user_wrote_cannot_end_the_script():
    def f(x):
        y = x * 2  # </script><script>alert(1)</script>
        return {"</script><b>": y.sin()}

    torch.manual_seed(0)
    from foregrad.tools.explanation.html import page

    text = page(foregrad.explain(f, torch.ones(3, requires_grad=True), backend="eager"))
    assert text.count("</script>") == 2
    assert "<b>'" not in text


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_report_of_24_layers_is_whole(gpt2, tmp_path):
    found, path = gpt2
    page, said = in_browser(path, tmp_path / "browser", fragment="#select=f:tanh_3")
    assert re.search(r'data-ready="\d+"', page)  # milliseconds: no promise of a test's, on a machine with neighbours
    assert said == []
    layers = len(re.findall(r'class="layer [^"]*"', page))
    assert layers == sum(one.kind == "saved" and one.nbytes > 0 for one in found.memory.saved)
    for block in range(24):
        assert f'aria-label="transformer.h.{block}, GPT2Block"' in page
    lines = len(found.sources[0].lines)
    assert len(re.findall(r'<div class="ln', page)) == lines
    # What the address selects is marked in the chart, the graph, the source, and told.
    assert re.search(r'class="layer [^"]*\bon\b[^"]*" data-key="f:tanh_3"', page)
    assert re.search(r'class="row on"[^>]*aria-label="tanh_3, aten.tanh, saved"', page)
    assert re.search(r'<div class="ln saved on"', page)
    assert "kept because aten.tanh_backward reads it" in page
    assert "<caption" not in page
    assert re.search(r">Operators <small>\d{4}</small>", page)


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_five_thousand_nodes_are_drawn(tmp_path):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            for _ in range(850):
                x = (x * self.scale).sin()
            return x

    found = foregrad.explain(Deep(), torch.randn(4, 8), backend="eager", measure=False)
    assert len(found.operators) >= 5_000
    page, said = in_browser(found.save(tmp_path / "deep.html"), tmp_path / "browser")
    assert said == []
    assert "data-ready=" in page
    stretches = re.findall(r"▸ (\d+) to (\d+) ", page)  # of 1,700 operators in one module
    assert [int(start) for start, _ in stretches] == [*range(1, 1_700, 50)]


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_small_report_has_everything(tmp_path):
    found = small()
    page, said = in_browser(found.save(tmp_path / "small.html"), tmp_path / "browser", "720,1200")
    assert said == []
    assert page.count('class="pill b again"') == len(found.memory.again) > 0
    for title in ("Saved", "Run twice", "Operators", "Inputs", "Guards"):
        assert f">{title} <small>" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert len(data["ops"]["name"]) == len(found.operators)


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_report_of_a_function_that_runs_eagerly_opens(tmp_path):
    def f(x):
        torch.manual_seed(0)
        return x * 2

    found = foregrad.explain(f, torch.ones(3, requires_grad=True), backend="eager")
    page, said = in_browser(found.save(tmp_path / "eager.html"), tmp_path / "browser")
    assert said == []
    assert "Seed before the call" in page
    assert "data-ready" in page


ACTIONS = """
const said = {};
const key = (where, name) => where.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
const $ = (id) => document.getElementById(id);
const rows = () => document.querySelectorAll("#scene .row").length;
const marked = (where) => [...document.querySelectorAll(where)].length;
said.unfolded = rows();
$("fold").click();
said.folded = rows();
$("scene").focus();
key($("scene"), "Home"); key($("scene"), "ArrowDown"); key($("scene"), "ArrowRight");
said.opened = rows();
key($("scene"), "ArrowLeft");
said.closed = rows();
$("unfold").click();
key($("chart"), "ArrowRight"); key($("chart"), "Enter");
said.fromChart = [marked("#chart .on"), marked("#scene .row.on"), marked("#code .ln.on"), $("detail").hidden];
[...document.querySelectorAll("#code .ln[data-op]")].pop().click();
said.fromSource = [$("detail").textContent.split(" ")[0], document.querySelector("#code .ln.on").dataset.n];
key(document.body, "Escape");
said.escaped = [$("detail").hidden, marked("#code .ln.on")];
const cells = (n) => [...document.querySelectorAll(`#table tbody tr td:nth-child(${n})`)].map((cell) => cell.textContent);
document.querySelector('#table th button[data-c="1"]').click();
said.sizes = cells(2);
document.querySelector('#table th button[data-c="1"]').click();
said.back = cells(2);
$("filter").value = "gelu"; $("filter").dispatchEvent(new Event("input"));
said.filtered = cells(5);
$("fold").click();
$("find").value = "gelu"; $("find").dispatchEvent(new Event("input"));
said.found = [$("found").textContent, rows(), marked("#scene .row.dim")];
$("find").value = ""; $("find").dispatchEvent(new Event("input"));
said.notFound = [$("found").textContent, rows()];
document.body.dataset.said = JSON.stringify(said);
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_it_folds_links_sorts_and_filters_with_keys_and_clicks(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16))
    found = foregrad.explain(model, torch.randn(64, 16), backend="eager", measure=False)
    path = found.save(tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</body>", f"<script>{ACTIONS}</script></body>"), encoding="utf-8")
    page, console = in_browser(path, tmp_path / "browser")
    assert console == []
    said = json.loads(html.unescape(re.search(r'data-said="([^"]*)"', page)[1]))
    assert said["folded"] == said["closed"] == 5  # one row a module
    assert said["folded"] < said["opened"] < said["unfolded"]
    assert said["fromChart"] == [1, 1, 1, False]
    name = found.sources[0].keys[int(said["fromSource"][1])].partition(":")[2]
    assert said["fromSource"][0] == name
    assert said["escaped"] == [True, 0]
    sizes = [one.nbytes for one in found.memory.saved]
    assert said["sizes"] == [in_bytes(size) for size in sorted(sizes, reverse=True)]
    assert said["back"] == [in_bytes(size) for size in sorted(sizes)]
    assert set(said["filtered"]) == {"aten.addmm", "aten.gelu"}
    assert said["found"][0] == "4 operators, 0 modules"  # of two modules, forward and backward
    assert said["found"][1] > said["folded"], "matches inside folded modules are shown"
    assert said["notFound"][0] == ""
