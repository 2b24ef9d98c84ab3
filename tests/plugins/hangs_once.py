"""A plugin: an encoding that hangs in native code, once, after some steps. No Python code gets to run then."""

import ctypes
import itertools
from pathlib import Path
from typing import Any, Literal

from cope_sweep.positions import ENCODINGS, Encoding

calls = itertools.count()
CALLS_BEFORE = 300


@ENCODINGS.register
class HangsOnce(Encoding):
    """Adds nothing. The file `marker` says that it has hung before."""

    kind: Literal["hangs_once"] = "hangs_once"
    marker: str

    def score(self, parameters: Any, attention: Any) -> Any:
        if next(calls) >= CALLS_BEFORE and not Path(self.marker).exists():
            Path(self.marker).touch()
            ctypes.PyDLL(None).sleep(100_000)  # keeps Python's lock
        return attention.q_BHQK.new_zeros(())
