"""Builds the documents into a static site: the pages of docs/, and all files of the repository that they link to.

    python -m docs.build [FOLDER]

Each file keeps its place, so a link that works in the repository works on the site. A link that leads nowhere, or to a
heading that does not exist, is an error. The search of the site finds the home page and the guide; developers' pages
and reports of results are reached by links.

For language models, the site also has the pages of the guide in Markdown, a list of them (llms.txt, as on
https://llmstxt.org), and all of them in one file (llms-full.txt).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "docs" / "zensical.toml"
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""The front matter of a page that the search leaves out."""


def links(markdown: str) -> set[str]:
    """The targets of the links and pictures of a text that are not addresses, without their anchors."""
    without_code = re.sub(r"^```.*?^```|`[^`\n]*`", "", markdown, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s#]+)|(?:src|href)=\"([^\"#]+)", without_code)
    return {target for target in map("".join, targets) if not re.match(r"[a-z]+:", target)}


def pages() -> set[Path]:
    """The files of the site, relative to the repository: README.md, docs/, and what they link to, directly or not.

    Raises FileNotFoundError for a link that leads to no file.
    """
    known: set[Path] = set()
    waiting = [Path("README.md"), *(path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md")))]
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        if path.suffix != ".md":
            continue
        for target in links((ROOT / path).read_text(encoding="utf-8")):
            file = (ROOT / path.parent / target).resolve()
            if not file.is_file():
                raise FileNotFoundError(f"{path} links to {target}, which is not a file")
            waiting.append(file.relative_to(ROOT))
    return known


def is_searched(path: Path) -> bool:
    """Whether the search finds a page: 60 others would otherwise come before the few that a user needs."""
    return path == Path("README.md") or path.parts[0] == "docs"


def guide() -> list[Path]:
    """The home page and the pages of the guide, in the order of the navigation."""

    def leaves(entry: Any) -> Iterator[Path]:
        if isinstance(entry, str):
            yield Path(entry)
        else:
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(inner)

    navigation = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]
    return [path for path in leaves(navigation) if is_searched(path)]


def without_front_matter(page: str) -> str:
    """The text of a page, from its first heading."""
    return re.sub(r"\A---\n.*?^---\n+", "", page, flags=re.DOTALL | re.MULTILINE)


def outline(page: str) -> tuple[str, str]:
    """The title of a page, and its first sentence, without links and other marks."""
    text = without_front_matter(page)
    title = re.search(r"^# (.+)$|<h1[^>]*>(.+?)</h1>", text, re.MULTILINE)
    paragraphs = re.sub(r"^```.*?^```|^<.*?$", "", text, flags=re.DOTALL | re.MULTILINE).split("\n\n")
    plain = (" ".join(part.split()) for part in paragraphs if re.match(r"\s*[\w*`\[]", part))
    sentence = re.split(r"(?<=[.:])\s", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", next(plain, "")))[0]
    return "".join(title.groups("")) if title else "", sentence.replace("**", "").rstrip(":")


def write_for_models(site: Path) -> None:
    """Write the pages of the guide in Markdown, llms.txt and llms-full.txt into the site."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in guide()}
    for path, text in texts.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")
    outlines = {path: outline(text) for path, text in texts.items()}
    lines = [
        f"- [{title}]({path.as_posix()}){sentence and f': {sentence}'}" for path, (title, sentence) in outlines.items()
    ]
    description = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["site_description"]
    head = f"# cope-sweep\n\n> {description}\n\n"
    listed = f"{head}## Pages\n\n" + "\n".join(lines) + "\n\n## All in one file\n\n- [llms-full.txt](llms-full.txt)\n"
    (site / "llms.txt").write_text(listed, encoding="utf-8")
    parts = [f"<!-- {path.as_posix()} -->\n\n{without_front_matter(text).strip()}\n" for path, text in texts.items()]
    (site / "llms-full.txt").write_text(head + "\n".join(parts), encoding="utf-8")


def build(site: Path) -> None:
    """Build the site into a folder, which is replaced. Raises CalledProcessError for a link that leads nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        shutil.copy(CONFIG, project)
        for path in pages():
            page = project / "pages" / path
            page.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, page)
            if path.suffix == ".md" and not is_searched(path):
                page.write_text(NOT_SEARCHED + page.read_text(encoding="utf-8"), encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(project / CONFIG.name)]
        subprocess.run(command, cwd=project, check=True)
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(project / "site", site)
    write_for_models(site)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")
    try:
        build(folder)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    served = f"python3 -m http.server --bind 127.0.0.1 --directory {shlex.quote(os.path.relpath(folder))} 8001"
    sys.stdout.write(f"Open {folder}/index.html; with its search: {served}, then http://127.0.0.1:8001\n")
