"""The Python examples in docs/how-to/look-inside.md and cope-in-practice.md run."""

import torch

from cope_sweep.model import Transformer, save_model
from tests.helpers.tiny import tiny_run
from tests.test_docs import code_blocks, read


def test_the_python_example(tmp_path):
    (example,) = code_blocks(read("docs/how-to/look-inside.md"), "python")
    run = tiny_run(**{"model.position": ["cope"]}, **{"task.vocabulary": 16})
    save_model(tmp_path, Transformer(run), run)
    names = {}
    exec(example.replace("store/runs/95199d1142de555d/checkpoint", tmp_path.as_posix()), names)
    assert names["gates_HTT"].shape == (2, 6, 6)
    assert names["statistics"][0].marks["data"].tokens_on == 2  # 3 and 0; 14 … 15 are not data


def test_the_table_of_a_trained_model_can_be_cut(tmp_path):
    (example,) = code_blocks(read("docs/how-to/cope-in-practice.md"), "python")
    run = tiny_run(**{"model.position": [{"kind": "cope", "p_max": 24, "std": 0.5}], "model.layers": 2})
    save_model(tmp_path, Transformer(run), run)
    names = {}
    exec(example.replace("store/runs/95199d1142de555d/checkpoint", tmp_path.as_posix()), names)
    (parameters,) = names["predictor"].model.position
    tables = [layer["e"] for layer in parameters.layers.values()]
    assert [len(table) for table in tables] == [16, 16]
    assert all(parameters.encoding.limit({"e": table}) == 15 for table in tables)
    tokens = torch.randint(run.sizes.vocabulary, (1, 60), generator=torch.Generator().manual_seed(0))
    assert names["predictor"].model(tokens).isfinite().all()
