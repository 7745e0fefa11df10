"""What is added to a wheel: the loops in C, compiled ahead for the machine that LONGITUDE_WHEEL names, and links.

Without it the wheel is pure, as `pip install .` makes it, and gcc compiles the loops on first use. LONGITUDE_GCC is the compiler.
LONGITUDE_URL is the address of the repository, which CI knows: with it the project's page and the links of its README lead there.
"""

import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Links(MetadataHookInterface):
    """README and the addresses of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called before an sdist or a wheel is packed."""
        url, release = os.environ.get("LONGITUDE_URL"), Path(self.root, ".ci/release.py")
        text = runpy.run_path(str(release))["page"](url) if url else Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {"Repository": url, "Changelog": f"{url}/blob/main/CHANGELOG.md"} if url else {}


class LoopsAhead(BuildHookInterface):
    """Compiles into a temporary folder, and names a wheel for Linux on that machine; auditwheel says for which versions."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is packed."""
        machine = os.environ.get("LONGITUDE_WHEEL")
        if not machine or version == "editable":
            return
        build = runpy.run_path(str(Path(self.root, "src/longitude/c_build.py")))  # the package itself needs torch
        if machine not in build["LEVELS"]:
            raise ValueError(f"expected LONGITUDE_WHEEL to be one of {', '.join(build['LEVELS'])}, got {machine!r}")
        self.folder = tempfile.TemporaryDirectory()
        made = build["compile_ahead"](machine, os.environ.get("LONGITUDE_GCC", "gcc"), Path(self.folder.name))
        for path in made:
            build_data["force_include"][str(path)] = (
                f"longitude/compiled/{path.relative_to(self.folder.name).as_posix()}"
            )
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-linux_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after it."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
