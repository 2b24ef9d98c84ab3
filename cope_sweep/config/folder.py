"""The folder of the ablation files: that of the working directory, or the one that comes with the package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
"""The folder of `cope_sweep`."""
DEFAULT_FOLDER = Path("ablations")


def ablations_folder(folder: Path = DEFAULT_FOLDER) -> Path:
    """`folder`, or the packaged ablations where it is the default and the working directory has none."""
    return folder if folder != DEFAULT_FOLDER or folder.exists() else packaged_ablations()


def packaged_ablations() -> Path:
    """The ablations of this installation: those of its wheel, or of the checkout that it was installed from."""
    installed = PACKAGE / "ablations"
    return installed if installed.is_dir() else PACKAGE.parent / "ablations"
