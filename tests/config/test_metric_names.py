import pytest

from cope_sweep.config import current_metric_name


@pytest.mark.parametrize(
    ("name", "current"),
    [
        ("in_dist/commonest_error", "in_dist/majority_baseline_error"),
        ("test/commonest_error@2048", "test/majority_baseline_error@2048"),
        ("in_dist/majority_baseline_error", "in_dist/majority_baseline_error"),
        ("in_dist/token_error", "in_dist/token_error"),
        ("commonest_error/loss", "commonest_error/loss"),
        ("facts.tokens_per_s", "facts.tokens_per_s"),
    ],
)
def test_former_names_are_replaced_and_others_are_not(name, current):
    assert current_metric_name(name) == current
