"""deploy/audit.py, with programs that answer as pip-audit does."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "audit.py"
SPEC = importlib.util.spec_from_file_location("deploy_audit", SCRIPT)
audit = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(audit)

FINE = {"name": "a", "version": "1.0", "vulns": []}
BAD = {"name": "b", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"], "aliases": []}]}
UNKNOWN = {"name": "c", "skip_reason": "not found on PyPI"}


@pytest.fixture
def answers(tmp_path):
    """Calling it makes a program that writes these packages, or fails as without a network; returns its command."""

    def make(packages):
        program = tmp_path / "pip_audit.py"
        if packages is None:
            program.write_text("import sys; sys.exit('requests.exceptions.ConnectionError: no route to host')")
        else:
            text = json.dumps({"dependencies": packages})
            program.write_text(
                "import sys, pathlib\n"
                "assert sys.argv[-2:] == ['--path', 'folder']\n"
                f"pathlib.Path(sys.argv[sys.argv.index('--output') + 1]).write_text({text!r})\n"
                f"sys.exit({int(any(each.get('vulns') for each in packages))})\n"
            )
        return (sys.executable, str(program))

    return make


@pytest.mark.parametrize(
    ("packages", "code", "message"),
    [
        ([FINE, UNKNOWN], 0, "1 of 2 packages audited, 0 known vulnerabilities"),
        ([FINE, BAD], 1, "b 2.0: PYSEC-1, fixed in 2.1"),
        ([UNKNOWN], 0, "NOT DONE, the advisory database knows none of the 1 packages"),
        (None, 0, "NOT DONE, the advisory database cannot be asked: requests.exceptions.ConnectionError"),
    ],
)
def test_vulnerabilities_fail_and_a_missing_database_is_said(answers, tmp_path, capsys, packages, code, message):
    assert audit.main("folder", tmp_path / "report.json", answers(packages)) == code
    assert message in capsys.readouterr().out


def test_a_release_audits_the_environment_of_its_wheel():
    text = (SCRIPT.parent / "release.sh").read_text()
    assert 'deploy/audit.py "$("$fresh/env/bin/python"' in text
