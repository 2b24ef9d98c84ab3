"""A plugin: an encoding that waits in each forward pass, so that a long run leaves the processor to others."""

import time
from typing import Any, Literal

from cope_sweep.positions import ENCODINGS, Encoding


@ENCODINGS.register
class Waits(Encoding):
    """Adds nothing."""

    kind: Literal["waits"] = "waits"

    def score(self, parameters: Any, attention: Any) -> Any:
        time.sleep(0.05)
        return attention.q_BHQK.new_zeros(())
