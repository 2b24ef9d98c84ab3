"""Settings from arguments and the environment."""

from __future__ import annotations

import pytest
from cope_services.http.settings import Settings, load_settings
from pydantic import ValidationError

from cope_sweep.errors import UserError
from tests.services.sample_store import SampleStore


def test_settings_are_checked(sample: SampleStore) -> None:
    with pytest.raises(UserError, match="the ablations folder /nowhere does not exist; .* COPE_SWEEP_ABLATIONS"):
        sample.settings(ablations="/nowhere")
    with pytest.raises(UserError, match="is not a folder, so it cannot be the store folder"):
        sample.settings(store=sample.ablations / "tiny.yaml")
    for invalid in (
        {"port": -1},
        {"max_tokens": 0},
        {"device": "tpu"},
        {"max_model_bytes": "many"},
        {"max_seconds": 0},
    ):
        with pytest.raises(ValidationError):
            sample.settings(**invalid)


def test_arguments_have_priority_over_the_environment(sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ABLATIONS": str(sample.ablations), "STORE": "none", "PORT": "1", "MAX_TOKENS": "5"}.items():
        monkeypatch.setenv(f"COPE_SWEEP_{name}", value)
    settings = load_settings(port=2)
    assert (settings.ablations, settings.store) == (sample.ablations, "none")
    assert (settings.port, settings.max_tokens, settings.max_inferences) == (2, 5, 0)
    assert load_settings().port == 1
    assert 1 <= settings.inferences() <= 4
    assert load_settings(max_inferences=9).inferences() == 9


def test_an_invalid_value_names_its_variable(sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPE_SWEEP_ABLATIONS", str(sample.ablations))
    monkeypatch.setenv("COPE_SWEEP_MAX_TOKENS", "many")
    with pytest.raises(
        UserError, match=r"COPE_SWEEP_MAX_TOKENS=many: it has to be a whole number; unset it for the default, 8192"
    ):
        load_settings()


def test_every_setting_has_a_description() -> None:
    assert all(field.description for field in Settings.model_fields.values())
