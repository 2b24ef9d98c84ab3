#!/usr/bin/env bash
# Builds the wheel, the sdist and the list of components (SBOM) into dist/, and checks them: their metadata, known
# vulnerabilities of the components (audit.py), and a first sweep in a fresh environment, outside of the checkout. PYTHON is the interpreter of the fresh environment.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD bin=$PWD/.venv/bin
version=$("$bin/python" -c 'import pathlib, re; print(re.search(r"__version__ = \"(.+)\"", pathlib.Path("cope_sweep/__init__.py").read_text())[1])')
grep -q "^## $version\$" CHANGELOG.md || { echo "CHANGELOG.md has no section \"## $version\"" >&2; exit 1; }

rm -rf dist
"$bin/python" -m build --installer uv
"$bin/twine" check --strict dist/*

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
"$bin/uv" venv --quiet --python "${PYTHON:-$bin/python}" "$fresh/env"
"$bin/uv" pip install --quiet --python "$fresh/env/bin/python" dist/*.whl
"$bin/cyclonedx-py" environment --output-reproducible --output-file "dist/cope_sweep-$version.cdx.json" "$fresh/env/bin/python"
"$bin/python" deploy/audit.py "$("$fresh/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "dist/cope_sweep-$version.audit.json"

mkdir "$fresh/work" "$fresh/home"
cd "$fresh/work"
fresh_run() { env -i HOME="$fresh/home" PATH="$fresh/env/bin:/usr/bin:/bin" COLUMNS=160 "$@"; }
tiny=(--set train.steps=4 --set train.batch=4 --set evaluate.final_sequences=8)
fresh_run cope-sweep list
fresh_run cope-sweep run quickstart --local "${tiny[@]}"
fresh_run cope-sweep table quickstart "${tiny[@]}" --format markdown
[ "$(fresh_run cope-sweep table quickstart "${tiny[@]}" --format csv | wc -l)" -ge 4 ]
cd "$root"
ls -l dist
echo "dist/ holds version $version; the wheel trained quickstart in a fresh environment"
