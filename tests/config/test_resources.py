import pytest
from pydantic import ValidationError

from cope_sweep.config import Resources


@pytest.mark.parametrize(
    "bad",
    [
        {"groups": 0}, {"groups": "all"}, {"workers": 0}, {"cpus": 0}, {"cpus": 1.5}, {"gpus": -1}, {"device": "tpu"},
        {"precision": "fp16"}, {"attention": "flash"}, {"micro_batch": 0}, {"checkpoint_every_s": 0},
        {"max_failures": -1}, {"cpu": 1}, {"compile": "on"}, {"shard": "all"},
        {"gpus": 0.5, "workers": 2}, {"gpus": 1.5},
    ],
)  # fmt: skip
def test_impossible_resources_are_refused(bad):
    with pytest.raises(ValidationError):
        Resources.model_validate(bad)


def test_a_share_of_a_gpu_can_be_asked_for():
    assert Resources(gpus=0.5).gpus == 0.5
    assert Resources(gpus=0.5, workers=2, device="cpu").workers == 2
    assert Resources(gpus="auto") == Resources()
