"""The ablation files of the project, without those that readers write beside them, as README.md asks them to."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINNED = Path("tests", "ablations", "run_ids.json")


def shipped_files(root: Path = ROOT) -> list[Path]:
    """The files that Git tracks; without Git, as in the source archive, those whose run ids are pinned.

    A new file counts after `git add`.
    """
    names = _tracked(root) or [f"ablations/{name}.yaml" for name in json.loads((root / PINNED).read_text("utf-8"))]
    return sorted(path for path in (root / name for name in names) if path.exists())


def _tracked(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--", "ablations/*.yaml"]
    # A hook's GIT_DIR may name another repository.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, cwd=root, env=kept, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [name for name in done.stdout.split("\0") if name]
