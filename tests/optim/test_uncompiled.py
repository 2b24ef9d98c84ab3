import pytest
import torch

from cope_sweep.optim import uncompiled
from tests.helpers.processes import output_of

TRAINS = """
import sys
from pathlib import Path
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.resume import load_state, snapshot_state, write_state
from tests.helpers.tiny import tiny_run

for optimizer in ("adamw", "muon"):
    trainer, second = (Trainer(tiny_run(**{"train.optimizer": optimizer}), Runtime()) for _ in range(2))
    trainer.train_step()
    path = Path(sys.argv[1]) / optimizer
    write_state(path, snapshot_state(trainer, {}))
    load_state(path, second)
    second.train_step()
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_process_trains_saves_and_resumes_without_the_compiler(tmp_path):
    assert output_of("-c", TRAINS, str(tmp_path)) == "True False\n"


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (uncompiled.AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
        (uncompiled.Muon, torch.optim.Muon, {"weight_decay": 0.1}),
    ],
)
def test_they_are_torch_s_to_the_bit(ours, theirs, settings):
    states = []
    for make in (ours, theirs):
        generator = torch.Generator().manual_seed(0)
        values = [torch.nn.Parameter(torch.randn(6, 4, generator=generator)) for _ in range(2)]
        optimizer = make(values[:1], lr=0.1, **settings)
        optimizer.add_param_group({"params": values[1:], "lr": 0.01})
        for _ in range(3):
            for value in values:
                value.grad = torch.randn(value.shape, generator=generator)
            optimizer.step()
        continued = make([{"params": [value]} for value in values], lr=1.0, **settings)
        continued.load_state_dict(optimizer.state_dict())
        continued.step()
        continued.zero_grad()
        assert all(value.grad is None and value.requires_grad for value in values)
        states.append((values, continued.state_dict()))
    (x, state), (y, expected) = states
    assert all(map(torch.equal, x, y))
    assert state["param_groups"] == expected["param_groups"]
    for index, entries in expected["state"].items():
        assert all(torch.equal(value, state["state"][index][key]) for key, value in entries.items())
