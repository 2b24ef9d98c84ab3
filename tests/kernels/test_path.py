"""`which` predicts, without data, the path that the attention of a model takes."""

import pytest
import torch

from cope_sweep.config import RunSpec
from cope_sweep.kernels import dispatch, operator, self_check, using, which
from cope_sweep.model import Transformer
from cope_sweep.positions import CoPE, CoPEMLP, Dims, Encoding

LISTS = {
    "none": [],
    "absolute": ["absolute"],
    "rope": ["rope"],
    "cope": ["cope"],
    "cope, separate gates": [{"kind": "cope", "gate": "separate"}],
    "cope and rope": ["cope", "rope"],
    "rotated table beside another": [{"kind": "cope", "rotated_query": True}, "relative", "rope"],
    "cope_mlp": ["cope_mlp"],
    "cope_mlp of gelu": [{"kind": "cope_mlp", "activation": "gelu"}],
    "both tables": ["cope", "cope_mlp"],
    "t5 and alibi": ["t5", "alibi"],
    "gates differ": ["cope", {"kind": "cope_alibi", "gate": "values"}],
}


def model(position, blanks, **fields):
    task = {"kind": "selective_copy", "tokens": 2, "vocabulary": 6, "dense_blanks": 1, "sparse_blanks": 4}
    sizes = {"layers": 1, "dim": 8, "heads": 2}
    return Transformer(
        RunSpec.model_validate({"task": task | {"blanks": blanks}, "model": sizes | {"position": position} | fields})
    )


@pytest.fixture
def used(monkeypatch):
    """The names of the paths that attention takes."""
    names = []
    monkeypatch.setattr(self_check, "why_not", lambda *_: None)  # checks compute attention, too

    def record(module, function, name_of):
        original = getattr(module, function)

        def recorded(*arguments):
            names.append(name_of(arguments))
            return original(*arguments)

        monkeypatch.setattr(module, function, recorded)

    record(operator, "attention", lambda arguments: arguments[1])
    record(dispatch, "reference", lambda _: "reference")
    record(dispatch, "_without_scores", lambda _: "sdpa")
    return names


SITUATIONS = [
    ("auto", 8, torch.float32, {}),
    ("auto", 40, torch.bfloat16, {}),
    ("auto", 300, torch.float32, {"dropout": 0.1}),
    ("auto", 300, torch.float64, {}),
    ("auto", 300, torch.bfloat16, {}),
    ("auto", 40, torch.float32, {"hard": True}),
    ("auto", 300, torch.float64, {"padded": True}),
    ("native", 40, torch.float64, {}),
    ("native", 20, torch.float32, {}),
    ("blocked", 8, torch.float32, {}),
    ("reference", 40, torch.float32, {}),
]


@pytest.mark.parametrize("position", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize(("implementation", "tokens", "dtype", "options"), SITUATIONS, ids=range(len(SITUATIONS)))
def test_the_path_is_the_one_that_attention_takes(used, position, implementation, tokens, dtype, options):
    fields = {"dropout": options.get("dropout", 0.0), "hard_attention": options.get("hard", False)}
    built = model(position, tokens - 4, **fields).to(dtype)
    encodings = [each.encoding for each in built.position]
    lengths = torch.tensor([tokens, 3]) if options.get("padded") else None
    with using(implementation), torch.no_grad():
        built(torch.zeros(2, tokens, dtype=torch.int64), lengths_B=lengths)
    name, reason = which(
        encodings,
        Dims(8, 2, 1, tokens),
        batch=2,
        dtype=dtype,
        implementation=implementation,
        **options,
    )
    assert used == [name]
    if implementation not in ("auto", name):
        assert implementation in reason


def test_reasons_name_what_prevents_a_fused_kernel():
    dims = Dims(8, 2, 1, 300)
    assert which([CoPE()], dims) == ("native", None)
    assert which([], dims, dtype=torch.bfloat16) == ("sdpa", None)
    name, reason = which([CoPE()], dims, dtype=torch.float64)
    assert name == "blocked"
    assert reason.endswith("the tensors are torch.float64; falling back to PyTorch (blocked)")


def test_a_machine_without_a_gpu_knows_the_paths_of_one():
    pytest.importorskip("triton")
    dims = Dims(64, 2, 1, 300)
    assert which([CoPE(gate="separate")], dims, device="cuda", dtype=torch.bfloat16) == ("triton", None)
    assert which([], dims, device="cuda", dtype=torch.bfloat16) == ("sdpa", None)
    name, reason = which([CoPE()], Dims(2048, 2, 1, 300), device="cuda")
    assert name == "blocked"
    assert "head dim 1024" in reason


@pytest.mark.parametrize(("keys", "instead"), [(300, "blocked"), (100, "reference")])
def test_a_gpu_has_no_kernel_for_cope_beside_cope_mlp(keys, instead):
    pytest.importorskip("triton")
    assert which([CoPEMLP()], Dims(64, 2, 1, keys), device="cuda") == ("triton", None)
    assert which([CoPE(), CoPEMLP()], Dims(64, 2, 1, keys), device="cuda") == (
        instead,
        f"triton is not used, it does not compute CoPE and CoPE-MLP in one layer; falling back to PyTorch ({instead})",
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hard_attention_has_no_fused_kernel(device):
    dims, reason = (
        Dims(64, 2, 1, 300),
        "attention is hard, and fused kernels compute the softmax only; using the reference",
    )
    assert which([CoPE()], dims, device=device, hard=True) == (
        "reference",
        f"no fused kernel is used, {reason}, which needs memory for all T × T scores",
    )
    for name in ("blocked", "native", "triton"):
        found = which([CoPE()], dims, device=device, hard=True, implementation=name)
        assert found == ("reference", f"{name} is not used, {reason}")


def test_decoding_uses_the_reference():
    assert which([CoPE()], Dims(8, 2, 1, 300), queries=1) == ("reference", None)


def test_asking_draws_no_random_numbers():
    before = torch.get_rng_state()
    which([CoPE()], Dims(8, 2, 1, 300), dropout=0.1)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_encoding_without_a_term_is_named():
    class Plain(Encoding):
        kind: str = "plain"

        def score(self, parameters, attention):
            return attention.logits_BHQS * 0

    name, reason = which([Plain()], Dims(8, 2, 1, 300))
    assert name == "reference"
    assert "the score of plain" in reason
