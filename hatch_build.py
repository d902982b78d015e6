"""The build backend's hook: compiles the C++ part of calls, where a compiler and PyTorch are there.

An installation never fails for it: without it calls go through Python. `FOREGRAD_BUILD_NATIVE=0` leaves it out, as for
a wheel that is to be installed elsewhere; `foregrad build-native` builds it later.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """For wheels, editable ones too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("FOREGRAD_BUILD_NATIVE", "1") == "0":
            return
        folder = Path(self.root) / "src" / "foregrad" / "_native"
        try:
            spec = importlib.util.spec_from_file_location("foregrad_native_build", folder / "build.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _, torch_version = module.find_torch()
            library = module.find_library(torch_version) or module.build(folder)
        except Exception as error:
            self.app.display_warning(f"foregrad's C++ part was not built, calls go through Python: {error}")
            return
        if library.parent == folder:
            build_data["artifacts"].append(library.relative_to(self.root).as_posix())
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
