"""The ablation files that commands name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cope_sweep.config import Plan, expand, load_ablation, with_overrides
from cope_sweep.config.loading import find_ablation
from cope_sweep.read.queries import AblationFiles
from cope_sweep.read.queries.ablations import Place


class NamedFiles(AblationFiles):
    """Ablations by name or path. A run is looked for in the store alone: the plans of all files take a second."""

    def __init__(self, folder: Path, sets: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self._sets = sets

    def file(self, name: str) -> Path:
        """The file of an ablation. Raises UserError."""
        known = self.files() if self.folder.is_dir() else {}
        return known.get(name) or find_ablation(name, self.folder, "choose the folder with --ablations")

    def load(self, name: str, scale: str | None = None) -> Plan:
        """The plan of an ablation at a scale, with the values of `--set`; kept if there are none. Raises UserError."""
        if not self._sets and self.folder.is_dir() and name in self.files():
            return super().load(name, scale)
        return self.plan(name, scale)

    def plan(self, name: str, scale: str | None) -> Plan:
        """The same as `load`, always made from the file. Raises UserError."""
        return expand(with_overrides(load_ablation(self.file(name)), scale=scale, assignments=list(self._sets)))

    def places(self, run_ids: Iterable[str]) -> dict[str, list[Place]]:
        """None."""
        return {}
