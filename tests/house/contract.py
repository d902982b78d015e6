"""Contracts for import-linter: no import into an annex but those that arrows.txt lists by name, and a package that
stands on public modules alone.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

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


class PublicContract(Contract):
    """The modules of `package` import, besides one another, the `public` modules alone, but for the `exceptions`, each
    of which is still an import. The package's door to private PyTorch, `_torch`, stands on the core's door.
    """

    package = fields.StringField()
    public = fields.ListField(subfield=fields.StringField())
    exceptions = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        inside = {self.package, *graph.find_descendants(self.package)}
        allowed = {*inside, *self.public}
        door = f"{self.package}._torch"
        found = {
            f"{module} -> {target}"
            for module in inside
            if not f"{module}.".startswith(f"{door}.")
            for target in graph.find_modules_directly_imported_by(module) - allowed
            if target.partition(".")[0] == self.package.partition(".")[0]
        }
        listed = set(self.exceptions or ())
        metadata = {"new": sorted(found - listed), "gone": sorted(listed - found)}
        return ContractCheck(kept=found == listed, metadata=metadata)

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["new"]:
            output.print_error(f"{line}: that is not public; ask through foregrad.extend")
        for line in check.metadata["gone"]:
            output.print_error(f"{line} is gone: take it out of the exceptions")
