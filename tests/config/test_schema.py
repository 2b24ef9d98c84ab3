from pathlib import Path

import jsonschema
import pytest

from cope_sweep.config import Ablation
from cope_sweep.config.ablation import ablation_schema
from cope_sweep.config.source import parse_source, read_source
from tests.helpers.processes import output_of
from tests.helpers.shipped import shipped_files

ABLATIONS = Path(__file__).parents[2] / "ablations"
VALIDATOR = jsonschema.Draft202012Validator(ablation_schema())


@pytest.mark.slow
def test_the_published_schema_is_the_current_one():
    """By a process of its own: other tests of this one may have loaded plugins."""
    current = output_of("-m", "cope_sweep.cli", "schema")
    published = (ABLATIONS / "schema.json").read_text()
    assert published == current, "renew it by: python -m docs.generate"


def unlimited(schema, path=()):
    """The places of integers without an upper limit."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer" and not {"maximum", "exclusiveMaximum", "const", "enum"} & schema.keys():
            yield path
        for key, value in schema.items():
            yield from unlimited(value, (*path, key))
    elif isinstance(schema, list):
        for each in schema:
            yield from unlimited(each, path)


def test_every_size_has_an_upper_limit():
    """But the bounds of drawn numbers: a run with a number that is drawn is validated."""
    assert {path[:4] for path in unlimited(ablation_schema())} == {
        ("$defs", "Distribution", "properties", name) for name in ("int_uniform", "log_int_uniform")
    }


def test_every_key_is_in_the_schema():
    schema = ablation_schema()
    assert set(schema["properties"]) == set(Ablation.model_json_schema()["properties"])
    assert {"task", "model", "train", "evaluate"} <= set(schema["properties"]["base"]["properties"])
    assert "seed" not in schema["properties"]["base"]["properties"]
    assert "required" not in schema["properties"]["base"]


@pytest.mark.parametrize("path", shipped_files(), ids=lambda path: path.stem)
def test_the_files_follow_the_schema(path):
    """As editors check them: also those that inherit, which are incomplete alone."""
    VALIDATOR.validate(read_source(path).data)


@pytest.mark.parametrize("variant", ["{relative.far: last}", "{relative: {far: last}}"])
def test_variants_follow_the_schema_in_either_form(variant):
    text = f"title: T\nbase: {{evaluate: {{variants: {{capped: {variant}}}}}}}\nmetrics: [{{name: test/loss}}]"
    VALIDATOR.validate(parse_source(text, "t").data)


@pytest.mark.parametrize("text", ["title: T", "title: T\nbase: {}", "title: T\ninherit: a\ngrid: {model.dim: 3}"])
def test_incomplete_files_do_not(text):
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(parse_source(text, "t").data)
