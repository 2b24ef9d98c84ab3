"""The claims of all files with their verdicts, as ablations/results/README.md shows them.

First a line for each table and figure of the paper, then what was found beyond it, then every claim wherever it was
measured. Of a claim that several reports make in the same words, one decides: with tuned rows, else of the paper's size,
else all of them together.
"""

import math
from dataclasses import dataclass
from itertools import groupby

from cope_sweep.config import load_ablation
from cope_sweep.read.numbers import MISSING
from cope_sweep.read.tables import Results
from cope_sweep.read.tables.claims import Finding, place_in_paper, with_q
from cope_sweep.read.tables.render import markdown_text
from tests.helpers.shipped import shipped_files

PAPER = {
    "Table 1": "counting in the last sentence, which language models fail at; here as a task that is trained",
    "Table 2": "Flip-Flop and selective copy",
    "Table 3": "counting with 1, 3 and 5 variables",
    "Table 4": "counting with more and with fewer passes than in training",
    "Table 5": "language models of text and of code",
    "Table 6": "the prompts of Table 1 in full",
    "Table 7": "Flip-Flop, architectures and sizes",
    "Table 8": "changes of CoPE, in language models",
    "Table 9": "Tables 3 and 4 with deviations",
    "Table 10": "selective copy of Table 2 with deviations",
    "Figure 1": "a drawing of the method",
    "Figure 2": "counting, less training data",
    "Figure 3": "language models at longer contexts than in training",
    "Figure 4": "attention maps of paragraphs and sections",
    "Figure 5": "Flip-Flop, convergence",
    "Figure 6": "gates at ends of paragraphs and titles of sections",
}
"""What a table or figure of the paper is about."""
ELSEWHERE = {
    "Table 6": "see Table 1",
    "Table 9": "see Tables 3 and 4",
    "Table 10": "see Table 2",
    "Figure 1": "no numbers",
}
"""Those that have no results of their own."""
UNDECIDED = ("too few seeds", "not testable", "not trained")
SIGNS = {"all": "✓", "some": "~", "none": "✗", "": "?"}
LEGEND = (
    "✓ all claims are shown, ~ some are, ✗ none is, ? none could be tested. A claim that several reports make is decided "
    "by the one with tuned rows, else by the one of the paper's size. Values are means over seeds; q is p, corrected for "
    "all claims of this page (Benjamini and Hochberg)."
)


@dataclass(frozen=True)
class Entry:
    """A claim in one report."""

    report: Results
    finding: Finding

    @property
    def stem(self) -> str:
        plan = self.report.plan
        return f"{plan.name}.{plan.ablation.scale}" if plan.ablation.scale else plan.name

    @property
    def link(self) -> str:
        return f"[{markdown_text(self.stem)}]({self.stem}.md)"

    @property
    def is_tuned(self) -> bool:
        return self.report.plan.ablation.content.tuned is not None

    @property
    def recipe(self) -> str:
        return "tuned" if self.is_tuned else "one recipe"

    @property
    def has_papers_size(self) -> bool:
        """The file as it is, with published values of a model: a scale is smaller."""
        return self.report.plan.ablation.scale is None and bool(self.finding.published)

    @property
    def size(self) -> str:
        """`the paper's size`, `2 layers of 64`."""
        model = self.report.plan.rows[0].runs[0].model
        return "the paper's size" if self.has_papers_size else f"{model.layers} layers of {model.dim}"

    @property
    def task(self) -> str:
        pairs = self.finding.pairs
        return pairs[0].better.runs[0][0].task.kind if pairs else ""

    @property
    def is_decided(self) -> bool:
        return self.finding.verdict not in UNDECIDED

    @property
    def verdict(self) -> str:
        """`**shown**`, with what the numbers are."""
        return f"**{self.finding.verdict_text}**"

    @property
    def evidence(self) -> str:
        """The numbers of the claim in this report, in a sentence."""
        found = self.finding
        numbers = [f"n = {found.texts['n']}" if found.n else "", self.recipe, self.size]
        if found.texts["difference"] != MISSING:
            numbers.append(f"difference {found.texts['difference']}")
        if found.texts["size"] != MISSING:
            numbers.append(f"{found.texts['size']} (margin {found.texts['margin']})")
        numbers += [f"{name} = {found.texts[name]}" for name in ("p", "q") if found.texts[name] != MISSING]
        if found.declared:
            numbers.append(f"declared {found.declared}")
        values = f"{found.measure}: {found.ours or MISSING}"
        published = f"; published: {found.published}" if found.published else ""
        details = ", ".join(filter(None, numbers))
        return f"{self.verdict} {markdown_text(f'{values}{published} ({details})')} {self.link}"


def claims_entries(reports, findings_of):
    """The claims of all reports, with q over all of them, in the order of the paper."""
    found = [(report, finding) for report in reports for finding in findings_of(report)]
    of_page = with_q([finding for _, finding in found])
    entries = [Entry(report, finding) for (report, _), finding in zip(found, of_page, strict=True)]
    return sorted(entries, key=lambda entry: place_in_paper(entry.finding.source))


def deciding(entries):
    """Those of the entries of one claim that decide."""
    decided = [entry for entry in entries if entry.is_decided]
    tuned = [entry for entry in decided if entry.is_tuned]
    return tuned or [entry for entry in decided if entry.has_papers_size] or decided or entries


def by_claim(entries):
    """(source, statement) → the entries of that claim."""
    groups = {}
    for entry in entries:
        groups.setdefault((entry.finding.source, entry.finding.claim), []).append(entry)
    return groups


def place_of(source):
    """`Figure 4` of `Figure 4 (left)`; empty without a source."""
    kind, _, number = source.partition(" ")
    return f"{kind} {number.split()[0]}" if number else ""


def sign_of(groups):
    """The sign for some claims, each with the entries that decide about it."""
    decided = [entry for group in groups for entry in deciding(group) if entry.is_decided]
    if not decided:
        return SIGNS[""]
    shown = [entry.finding.verdict == "shown" for entry in decided]
    in_part = any(entry.finding.verdict in ("shown in part", "mixed") for entry in decided)
    return SIGNS["all" if all(shown) else "some" if any(shown) or in_part else "none"]


def lines_of_paper(groups):
    """A Markdown table with a line for each table and figure of the paper."""
    lines = [
        "| | paper | about | claims shown | the first one | n | recipe, size | report |",
        "| - | - | - | - | - | - | - | - |",
    ]
    for place, about in PAPER.items():
        if place in ELSEWHERE:
            lines.append(f"| = | {place} | {about} | {ELSEWHERE[place]} | | | | |")
            continue
        own = [group for (source, _), group in groups.items() if place_of(source) == place]
        leading = [deciding(group)[0] for group in own]
        shown = sum(all(entry.finding.verdict == "shown" for entry in deciding(group)) for group in own)
        # One of each task: Table 2 is about two.
        firsts = [
            next(each) for _, each in groupby(sorted(leading, key=lambda entry: entry.task), lambda entry: entry.task)
        ]
        cells = [
            sign_of(own),
            place,
            about,
            f"{shown} of {len(own)}",
            "<br>".join(
                markdown_text(f"{each.finding.measure}: {each.finding.headline or MISSING}") for each in firsts
            ),
            "<br>".join(each.finding.texts["n"] for each in firsts),
            "<br>".join(f"{each.recipe}, {each.size}" for each in firsts),
            "<br>".join(each.link for each in firsts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def lines_beyond(groups):
    """A Markdown table with a line for each claim that is none of the paper's."""
    lines = ["| | claim | result | n | p | q | recipe, size | report |", "| - | - | - | - | - | - | - | - |"]
    beyond = [(claim, group) for (source, claim), group in groups.items() if not source]
    # What is shown first, the surest of it before the rest.
    order = list(SIGNS.values())
    for claim, group in sorted(beyond, key=lambda each: (order.index(sign_of([each[1]])), surest(each[1]))):
        for entry in deciding(group):
            found = entry.finding
            cells = [
                sign_of([[entry]]),
                markdown_text(claim) + reason(entry),
                markdown_text(f"{found.measure}: {found.headline or MISSING}"),
                *(found.texts[name] for name in ("n", "p", "q")),
                f"{entry.recipe}, {entry.size}",
                entry.link,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def surest(entries):
    """The smallest q of the entries that decide; those without one come last."""
    return min((entry.finding.q for entry in deciding(entries) if not math.isnan(entry.finding.q)), default=math.inf)


def reason(entry):
    """Why a claim is not shown, and what would settle it, below it."""
    found = entry.finding
    return f"<br>*{markdown_text(found.note)}*" if found.note and found.verdict != "shown" else ""


def lines_of_claims(groups):
    """A Markdown table with a line for each claim, and in it every report that measures it."""
    lines = ["| paper | claim | measured |", "| - | - | - |"]
    for (source, claim), group in groups.items():
        notes = dict.fromkeys(filter(None, map(reason, group)))
        ordered = sorted(group, key=lambda entry: entry not in deciding(group))
        measured = "<br>".join(entry.evidence for entry in ordered)
        lines.append(f"| {markdown_text(source or MISSING)} | {markdown_text(claim)}{''.join(notes)} | {measured} |")
    for path, text, source in untrained(groups):
        link = f"[{markdown_text(path.stem)}](../{path.name})"
        lines.append(f"| {markdown_text(source or MISSING)} | {markdown_text(text)} | **not trained** {link} |")
    return "\n".join(lines) + "\n"


def untrained(groups):
    """The claims of shipped files that no report has: (file, statement, source)."""
    for path in shipped_files():
        content = load_ablation(path).content
        claims = [(each.text, each.source) for each in content.claims]
        claims += [(each.claim, each.source) for each in content.figures if each.has_claim]
        yield from ((path, text, source) for text, source in claims if (source, text) not in groups)


def claims_text(reports, findings_of):
    """The part of ablations/results/README.md about claims."""
    groups = by_claim(claims_entries(reports, findings_of))
    return (
        f"## The paper, table by table\n\n{LEGEND}\n\n{lines_of_paper(groups)}\n"
        f"## Beyond the paper\n\n{lines_beyond(groups)}\n"
        "## Every claim, wherever it is measured\n\nThe report that decides comes first. Difference: of the weakest pair of "
        f"rows, with its 95 % interval. [What the verdicts mean](../../docs/concepts/statistics.md).\n\n{lines_of_claims(groups)}"
    )
