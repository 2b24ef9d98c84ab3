"""Names of the service's files in messages, without their places on its machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class ShownPaths:
    """Leaves out the folders that contain the folders of the service: `/srv/data/store/x` is shown as `store/x`."""

    def __init__(self, folders: Iterable[Path]) -> None:
        parents = {parent for folder in folders for parent in (folder.absolute().parent, folder.resolve().parent)}
        self._hidden = sorted((f"{parent}/" for parent in parents if parent != Path("/")), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """A message as it is shown to clients."""
        for each in self._hidden:
            text = text.replace(each, "")
        return text
