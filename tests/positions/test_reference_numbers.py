"""Outputs and gradients of released code for small random cases, `reference/*.json`, in float64.

It is the authors' code, for PoPE a library. The names of the tensors are theirs. A file's `origin` says which code ran, and what was replaced to run it on a CPU.
"""

import json
from pathlib import Path

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, reference
from cope_sweep.positions import Dims
from cope_sweep.positions.alibi import ALiBi
from cope_sweep.positions.dape import DAPE
from cope_sweep.positions.fire import FIRE
from cope_sweep.positions.fox import FoX
from cope_sweep.positions.grape_ap import GrapeAP
from cope_sweep.positions.kerple import Kerple
from cope_sweep.positions.path import PaTH
from cope_sweep.positions.pope import PoPE
from cope_sweep.positions.repo import RePo
from cope_sweep.positions.rope import RoPE
from cope_sweep.positions.selective_rope import SelectiveRoPE
from cope_sweep.positions.stick_breaking import StickBreaking
from cope_sweep.positions.tra import TRA
from cope_sweep.positions.wall import Wall
from cope_sweep.positions.xpos import XPos

FILES = Path(__file__).with_name("reference")

KERPLE = {"p": "bias_p", "a": "bias_a"}
FIRE_NAMES = {
    "w1": "mlp.0.weight",
    "b1": "mlp.0.bias",
    "w2": "mlp.2.weight",
    "b2": "mlp.2.bias",
    "c": "c",
    "factor": "L_multiplier",
}
SELECTIVE = {"down": "phi_proj.0.weight", "up": "phi_proj.1.weight", "taps": "phi_conv1d.weight"}
PHASE_GATE = {"gate_weight": "phase_gate_proj.weight", "gate_bias": "phase_gate_proj.bias"}
MLP = {"mlp_w1": "mlp2.0.weight", "mlp_b1": "mlp2.0.bias", "mlp_w2": "mlp2.2.weight", "mlp_b2": "mlp2.2.bias"}
PATH_NAMES = {
    "down": "w_proj.0.weight",
    "up": "w_proj.1.weight",
    "taps": "w_conv1d.weight",
    "beta_weight": "bt_proj.weight",
    "beta_bias": "bt_proj.bias",
}
WALL_NAMES = {"gate_weight": "gate_proj.weight", "gate_bias": "gate_proj.bias"}

# file, case: our encoding or encodings, and the authors' name of each of our parameters
CASES = {
    ("alibi", "default"): (ALiBi(), {}),
    ("cable", "default"): (
        FoX(scaled=False),
        {"forget_weight": "-h_attn.weight", "forget_bias": "-h_attn.bias"},
    ),
    ("dape", "alibi"): (DAPE(bias="alibi", hidden=5), MLP),
    ("dape", "fire"): (DAPE(bias="fire"), MLP | {f"fire_{ours}": theirs for ours, theirs in FIRE_NAMES.items()}),
    ("dape", "kerple"): (
        DAPE(bias="kerple", hidden=5),
        MLP | {f"kerple_{ours}": theirs for ours, theirs in KERPLE.items()},
    ),
    ("fire", "default"): (FIRE(hidden=5, threshold=3), FIRE_NAMES),
    ("fox", "default"): (FoX(), {"forget_weight": "f_proj.weight", "forget_bias": "f_proj.bias"}),
    ("grape_ap", "released"): (GrapeAP(reading="released", size=6), {"path": "c_p.weight"}),
    ("kerple", "clamped"): (Kerple(), KERPLE),
    ("kerple", "default"): (Kerple(), KERPLE),
    ("path", "default"): (PaTH(rank=3), PATH_NAMES),
    ("path_fox", "forget_gates"): (
        [PaTH(rank=3), FoX(scale_positions=True)],
        PATH_NAMES | {"forget_weight": "g_proj.weight", "forget_bias": "g_proj.bias"},
    ),
    ("pope", "default"): (PoPE(), {"delta": "bias"}),
    ("pope", "partial"): (PoPE(channels=3), {"delta": "bias"}),
    ("repo", "default"): (
        RePo(hidden=3),
        {"gate": "gate_map.weight", "content": "content_map.weight", "position": "final_map.weight"},
    ),
    ("rope", "ntk"): (RoPE(scaling="ntk", factor=4), {}),
    ("rope", "pi"): (RoPE(scaling="pi", factor=4), {}),
    ("selective_rope", "head"): (SelectiveRoPE(rank=3, unit="head"), SELECTIVE),
    ("selective_rope", "silu_and_gate"): (
        SelectiveRoPE(rank=3, unit="head", activation="silu", phase_gate=True),
        SELECTIVE | PHASE_GATE,
    ),
    ("selective_rope", "silu_gate_and_bias"): (
        SelectiveRoPE(rank=3, unit="head", activation="silu", phase_gate=True, phase_bias=True),
        SELECTIVE | PHASE_GATE | {"log_bias": "phi_bias"},
    ),
    ("stick_breaking", "drop"): (StickBreaking(), {}),
    ("stick_breaking", "self"): (StickBreaking(remainder="self"), {}),
    ("tra", "default"): (TRA(), {"decay_weight": "delta_proj.weight", "decay_bias": "delta_proj.bias"}),
    ("wall", "default"): (Wall(), WALL_NAMES),
    ("wall", "scalar_gate"): (
        [Wall(), FoX(start=8)],
        WALL_NAMES | {"forget_weight": "scalar.weight", "forget_bias": "scalar.bias"},
    ),
    ("xpos", "default"): (XPos(), {}),
}


def test_every_stored_case_is_compared():
    stored = {(file.stem, case) for file in FILES.glob("*.json") for case in json.loads(file.read_text())["cases"]}
    assert stored == set(CASES)


@pytest.mark.parametrize(("file", "case"), CASES)
def test_outputs_and_gradients_are_those_of_the_authors_code(file, case):
    encodings, names = CASES[file, case]
    encodings = encodings if isinstance(encodings, list) else [encodings]
    stored = json.loads((FILES / f"{file}.json").read_text())["cases"][case]
    leaves = {
        name: torch.tensor(values, dtype=torch.float64, requires_grad=True) for name, values in stored["inputs"].items()
    }
    q, k, v, x = (leaves.get(name) for name in ("q", "k", "v", "x"))
    _, heads, tokens, head_dim = q.shape
    positions, of_all, turned = [], [], [q, k]
    for encoding in encodings:
        declared = encoding.parameters(Dims(heads * head_dim, heads, layers=1, context=tokens))
        parameters = {name: leaves[names[name]].view(declared[name].shape) for name in declared}
        features = None if x is None else encoding.features(parameters, x)
        if features is not None:
            features = features.view(1, tokens, heads, -1).transpose(1, 2)
        turned = [
            encoding.rotate(parameters, each, 0, features, keys=keys)
            for each, keys in zip(turned, (False, True), strict=True)
        ]
        positions.append(LayerEncoding(encoding, parameters))
        of_all.append(features)
    output = reference(Inputs(q, k, v, *turned, of_all), positions)
    output.backward(torch.tensor(stored["upstream"], dtype=torch.float64))
    # The numbers are stored with 12 digits.
    expected = {"output": stored["output"], **stored["gradients"]}
    for name, values in {"output": output, **{name: leaf.grad for name, leaf in leaves.items()}}.items():
        wanted = torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(values, wanted, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
