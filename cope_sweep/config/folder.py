"""The folder of the ablation files: that of the working directory, or the one that comes with the package."""

from __future__ import annotations

from pathlib import Path

from cope_sweep.config.explain import suggest
from cope_sweep.errors import UserError

PACKAGE = Path(__file__).parents[1]
"""The folder of `cope_sweep`."""
DEFAULT_FOLDER = Path("ablations")


def ablations_folder(folder: Path = DEFAULT_FOLDER) -> Path:
    """`folder`, or the packaged ablations where it is the default and the working directory has none."""
    return folder if folder != DEFAULT_FOLDER or folder.exists() else packaged_ablations()


def find_ablation(ablation: str | Path, folder: Path, otherwise: str) -> Path:
    """The file of an ablation, given its path, or its name in a folder.

    Raises UserError where there is none; it says `otherwise` where the folder has no ablation at all.
    """
    path = Path(ablation)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    if (named := folder / f"{ablation}.yaml").exists():
        return named
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    hint = suggest(str(ablation), known) or f"; {otherwise}"
    raise UserError(f"no ablation {str(ablation)!r} in {folder.absolute()}{hint}")


def packaged_ablations() -> Path:
    """The ablations of this installation: those of its wheel, or of the checkout that it was installed from."""
    installed = PACKAGE / "ablations"
    return installed if installed.is_dir() else PACKAGE.parent / "ablations"
