"""The Python example in docs/how-to/look-inside.md runs."""

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
