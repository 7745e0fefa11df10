"""What is added when the package is built or installed: the C kernels, compiled, and links.

`pip install` compiles them, in place for an editable install, and goes on without them if there is no gcc. In the environment:

    LONGITUDE_WHEEL     machine of a published wheel, x86_64 or aarch64, for which it must compile; none: without kernels
    LONGITUDE_GCC       the compiler
    LONGITUDE_COMPILE   0: compile nothing
    LONGITUDE_URL       address of the repository, which CI knows; the project's page and the links of its README lead there
"""

import os
import platform
import runpy
import subprocess
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


class Kernels(BuildHookInterface):
    """Compiles the C kernels, and names a wheel for Linux on their machine; auditwheel says for which versions."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is packed."""
        build = runpy.run_path(str(Path(self.root, "src/longitude/native/build.py")))  # the package itself needs torch
        if version == "editable":
            self.app.display_info(build["compile_here"]())
            return
        wanted, compiler = os.environ.get("LONGITUDE_WHEEL"), os.environ.get("LONGITUDE_GCC", "gcc")
        machine = wanted or platform.machine()
        if wanted not in (None, "none", *build["LEVELS"]):
            raise ValueError(
                f"expected LONGITUDE_WHEEL to be none or one of {', '.join(build['LEVELS'])}, got {wanted!r}"
            )
        why = "no C kernels were asked for" if wanted == "none" else None if wanted else build["why_not"](compiler)
        if why is not None:
            self.app.display_warning(why)
            return
        self.folder = tempfile.TemporaryDirectory()
        try:
            made = build["compile_all"](machine, build["LEVELS"][machine], compiler, Path(self.folder.name))
        except (OSError, subprocess.CalledProcessError) as error:
            if wanted:
                raise
            self.app.display_warning(f"no C kernels: {error}: {getattr(error, 'stderr', '')}")
            return
        for path in made:
            inside = path.relative_to(self.folder.name).as_posix()
            build_data["force_include"][str(path)] = f"longitude/native/compiled/{inside}"
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-linux_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after it."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
