"""A plugin: an encoding that makes a training step last long without a processor, and logs on which node it was."""

import os
import socket
import time
from typing import Any, Literal

import torch

from cope_sweep.positions import ENCODINGS, Encoding


@ENCODINGS.register
class SlowSteps(Encoding):
    """Adds nothing. Each step appends the node's name to the file `log`."""

    kind: Literal["slow_steps"] = "slow_steps"
    log: str
    step_s: float

    def score(self, parameters: Any, attention: Any) -> Any:
        if torch.is_grad_enabled():
            file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{socket.gethostname()}\n".encode())
            os.close(file)
            time.sleep(self.step_s)
        return attention.q_BHQK.new_zeros(())
