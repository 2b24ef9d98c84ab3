"""The claims of all files with their verdicts, as ablations/results/README.md shows them.

First a line for each table and figure of the paper, then what was found beyond it, then every claim wherever it was
measured. Of a claim that several reports make about one task in the same words, whatever table of the paper they name,
one decides: with tuned rows, of these one whose rows have the same hardware; else of the paper's size, else all of them
together.
"""

import math
from dataclasses import dataclass
from itertools import groupby

from cope_sweep.config import load_ablation
from cope_sweep.read.numbers import MISSING
from cope_sweep.read.tables import Results
from cope_sweep.read.tables.claims import Finding, place_in_paper, with_q
from cope_sweep.read.tables.model import hardware_of_rows
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
SIGNS = {"all": "✓", "weak": "(✓)", "some": "~", "none": "✗", "": "?"}
MOST_Q = 0.05
"""The largest q of a claim that is shown without brackets."""
LEGEND = (
    "✓ all claims are shown, ~ some are, or in part, ✗ none is, ? none could be tested. (✓): shown, but q > 0.05 for "
    "one of them. A claim that several reports make about a task is decided by the one with tuned rows (by one with the "
    "same hardware for all rows, if there is any), else by the one of the paper's size; if there is neither, all have to "
    "agree. Values are means over seeds, of the weakest pair of rows. p is corrected within a report (Holm), q for all "
    "claims of this page that rows are better (Benjamini and Hochberg): of claims with q ≤ 0.05, at most 5 % are false, "
    "on average. Claims by a margin are judged by intervals, without p."
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
        if self.has_papers_size:
            return "the paper's size"
        pairs = self.finding.pairs
        model = (pairs[0].better.runs[0][0] if pairs else self.report.plan.rows[0].runs[0]).model
        return f"{model.layers} layer{'s' * (model.layers > 1)} of {model.dim}"

    @property
    def task(self) -> str:
        pairs = self.finding.pairs
        return pairs[0].better.runs[0][0].task.kind if pairs else ""

    @property
    def sign(self) -> str:
        return sign_of([[self]])

    @property
    def hardware(self) -> str:
        """`hardware follows the row`, where it does for the rows of this claim."""
        rows = {row.row: row for pair in self.finding.pairs for row in (pair.better, pair.than)}
        runs = [(name, run, record) for name, row in rows.items() for run, record in row.runs]
        return "hardware follows the row" if hardware_of_rows(runs) else ""

    @property
    def setting(self) -> str:
        """`tuned, 2 layers of 64`."""
        return ", ".join(filter(None, (self.recipe, self.size, self.hardware)))

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
        numbers = [f"n = {found.texts['n']}" if found.n else "", self.setting]
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
    tuned = [entry for entry in tuned if not entry.hardware] or tuned
    return tuned or [entry for entry in decided if entry.has_papers_size] or decided or entries


def by_claim(entries):
    """(source, statement, task) → the entries of that claim, whatever source they name themselves."""
    of_statement = {}
    for entry in entries:
        of_statement.setdefault((entry.finding.claim, entry.task), []).append(entry)
    keys = dict.fromkeys((entry.finding.source, entry.finding.claim, entry.task) for entry in entries)
    return {key: of_statement[key[1:]] for key in keys}


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
    if all(shown):
        return SIGNS["weak" if any(entry.finding.q > MOST_Q for entry in decided) else "all"]
    return SIGNS["some" if any(shown) or in_part else "none"]


def lines_of_paper(groups):
    """A Markdown table with a line for each table and figure of the paper."""
    lines = [
        "| | paper | about | claims shown | the first one | n | q | recipe, size | report |",
        "| - | - | - | - | - | - | - | - | - |",
    ]
    for place, about in PAPER.items():
        if place in ELSEWHERE:
            lines.append(f"| = | {place} | {about} | {ELSEWHERE[place]} | | | | | |")
            continue
        own = [group for (source, *_), group in groups.items() if place_of(source) == place]
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
                f"{each.sign} {markdown_text(f'{each.finding.measure}: {each.finding.headline or MISSING}')}"
                for each in firsts
            ),
            "<br>".join(each.finding.texts["n"] for each in firsts),
            "<br>".join(each.finding.texts["q"] for each in firsts),
            "<br>".join(each.setting for each in firsts),
            "<br>".join(each.link for each in firsts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def lines_beyond(groups):
    """A Markdown table with a line for each claim that is none of the paper's."""
    lines = ["| | claim | result | n | p | q | recipe, size | report |", "| - | - | - | - | - | - | - | - |"]
    beyond = [(claim, group) for (source, claim, _), group in groups.items() if not source]
    tasks = {claim: {entry.task for each, group in beyond if each == claim for entry in group} for claim, _ in beyond}
    # What is shown first, the surest of it before the rest.
    order = list(SIGNS.values())
    for claim, group in sorted(beyond, key=lambda each: (order.index(sign_of([each[1]])), surest(each[1]))):
        for entry in deciding(group):
            found = entry.finding
            about = f" ({entry.task})" if len(tasks[claim]) > 1 else ""
            cells = [
                entry.sign,
                markdown_text(claim + about) + note_of(entry),
                markdown_text(f"{found.measure}: {found.headline or MISSING}"),
                *(found.texts[name] for name in ("n", "p", "q")),
                entry.setting,
                entry.link,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def surest(entries):
    """The smallest q of the entries that decide; those without one come last."""
    return min((entry.finding.q for entry in deciding(entries) if not math.isnan(entry.finding.q)), default=math.inf)


def note_of(entry):
    """What qualifies a claim, why it is not shown, and what would settle it, below it."""
    found = entry.finding
    return f"<br>*{markdown_text(found.note)}*" if found.note else ""


def lines_of_claims(groups):
    """A Markdown table with a line for each claim, and in it every report that measures it."""
    lines = ["| paper | claim | measured |", "| - | - | - |"]
    tasks = {}
    for source, claim, task in groups:
        tasks.setdefault((source, claim), set()).add(task)
    for (source, claim, task), group in groups.items():
        notes = dict.fromkeys(filter(None, map(note_of, group)))
        about = f" ({task})" if len(tasks[source, claim]) > 1 else ""
        ordered = sorted(group, key=lambda entry: entry not in deciding(group))
        measured = "<br>".join(entry.evidence for entry in ordered)
        stated = markdown_text(claim + about) + "".join(notes)
        lines.append(f"| {markdown_text(source or MISSING)} | {stated} | {measured} |")
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
        measured = {(source, text) for source, text, _ in groups}
        yield from ((path, text, source) for text, source in claims if (source, text) not in measured)


def claims_text(reports, findings_of):
    """The part of ablations/results/README.md about claims."""
    groups = by_claim(claims_entries(reports, findings_of))
    return (
        f"## The paper, table by table\n\n{LEGEND}\n\n{lines_of_paper(groups)}\n"
        f"## Beyond the paper\n\n{lines_beyond(groups)}\n"
        "## Every claim, wherever it is measured\n\nThe report that decides comes first. Difference and p: of the "
        "weakest pair of rows, with a 95 % interval that is not corrected. "
        f"[What the verdicts mean](../../docs/concepts/statistics.md).\n\n{lines_of_claims(groups)}"
    )
