"""Writes `cope_sweep/text/python_packages.json` from the packages of this environment: `python -m
tests.tasks.python_packages`. Runs on other files have other fingerprints, so do this only for a new corpus.
"""

import json
from importlib.metadata import distribution

from cope_sweep.text.packages import PINNED, Package, digest, sources

LICENCES = {
    "Apache-2.0": "accelerate databricks-sdk huggingface_hub mlflow moto peft playwright ray torch transformers",
    "BSD-3-Clause": "mpmath networkx numpy pandas protobuf scikit-learn scipy starlette sympy",
    "BSD-2-Clause": "Pygments",
    "MIT": "SQLAlchemy alembic fastapi fonttools mcp mypy narwhals optuna pydantic pymdown-extensions pytest rich schemathesis "
    "setuptools triton",
    "MIT-CMU": "pillow",
    "PSF-2.0": "matplotlib",
}
HELD_OUT = {"validation": "networkx optuna schemathesis", "test": "scikit-learn"}


def packages() -> dict[str, Package]:
    """What is pinned of the packages above, as they are installed."""
    splits = {name: split for split, names in HELD_OUT.items() for name in names.split()}
    pinned: dict[str, Package] = {}
    for name, licence in sorted((name, licence) for licence, names in LICENCES.items() for name in names.split()):
        paths = sources(name)
        pinned[name] = {
            "version": distribution(name).version,
            "licence": licence,
            "split": splits.get(name, "train"),
            "sha256": digest(paths),
        }
    return pinned


if __name__ == "__main__":
    PINNED.write_text(json.dumps(packages(), indent=1) + "\n", "utf-8")
