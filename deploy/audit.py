"""Looks for known vulnerabilities of installed packages: python audit.py SITE_PACKAGES REPORT.json

Exit code 1 if there are some; with what pip-audit says about them in the report. Where no advisory database can be
asked, as without a network, it says so, and the exit code is 0.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 600


def main(site_packages: str, report: Path, command: tuple[str, ...] = (sys.executable, "-m", "pip_audit")) -> int:
    """Audit the packages of a folder; return the exit code."""
    report.unlink(missing_ok=True)
    options = ["--progress-spinner", "off", "--format", "json", "--output", str(report), "--path", site_packages]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if not report.exists():
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        print(f"audit: NOT DONE, the advisory database cannot be asked: {reason}")  # noqa: T201
        return 0
    packages: list[dict[str, Any]] = json.loads(report.read_text())["dependencies"]
    known = [each for each in packages if "skip_reason" not in each]
    found = [(each, vulnerability) for each in known for vulnerability in each["vulns"]]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"audit: {package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")  # noqa: T201
    if not known:
        print(f"audit: NOT DONE, the advisory database knows none of the {len(packages)} packages")  # noqa: T201
        return 0
    print(f"audit: {len(known)} of {len(packages)} packages audited, {len(found)} known vulnerabilities")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
