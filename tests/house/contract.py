"""An import-linter contract: no import into an annex but those that arrows.txt lists by name."""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

from tests.house.measure import ALLOWED_ARROWS, arrows, listed_arrows


class AnnexContract(Contract):
    """The core imports no annex, and no annex another, but for the listed arrows; a listed arrow that is gone is unlisted."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        now, listed = set(arrows()), listed_arrows()
        return ContractCheck(kept=now == listed, metadata={"new": sorted(now - listed), "gone": sorted(listed - now)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, target in check.metadata["new"]:
            output.print_error(f"{module} imports {target}, which is another subject: ask through foregrad.extend")
        for module, target in check.metadata["gone"]:
            output.print_error(
                f"{module} -> {target} is gone: take it out of {ALLOWED_ARROWS.name} (make sizes ARGS=--write)"
            )
