"""The store and the ablation files that commands name."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cope_sweep.cli.output import make_console, print_note
from cope_sweep.cli.progress import indexing_bar
from cope_sweep.config import Plan, expand, load_ablation, with_overrides
from cope_sweep.config.loading import ablation_files, find_ablation, names_a_file, option_words
from cope_sweep.config.overrides import changed_axes
from cope_sweep.config.source import ablations_folder
from cope_sweep.errors import NotFoundError, UserError
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.queries.ablations import RESULTS, Place
from cope_sweep.read.queries.recorded import RecordedAblation
from cope_sweep.read.queries.unknown import no_run
from cope_sweep.store import ParquetStore, Store
from cope_sweep.store import parquet as stores
from cope_sweep.store.artifacts import RUN_ID


class NamedFiles(AblationFiles):
    """Ablations by name or path. A run is looked for in the store alone: the plans of all files take a second."""

    IMPORTS_RECORDED = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._are_sets_explained = False
        """Whether it was printed what `--set` did to seeds and axes."""
        self._noted: set[str] = set()
        """Ablations without a file: those for which the sweep they come from was printed."""

    def file(self, name: str) -> Path:
        """The file of an ablation. Raises UserError."""
        return find_ablation(name, self.folder, "choose the folder with --ablations")

    def load(self, name: str, scale: str | None = None, sets: Sequence[str] = ()) -> Plan:
        """The plan of an ablation at a scale, with `--set`; cached if there is none. Raises UserError."""
        typed = [name]
        if self.folder != ablations_folder() and not names_a_file(name):
            typed += ["--ablations", str(self.folder)]
        if typed == [name] and not sets and self.folder.is_dir() and name in self.files():
            return super().load(name, scale)
        loaded = with_overrides(load_ablation(self.file(name)), scale=scale, assignments=list(sets))
        plan = expand(replace(loaded, typed=tuple(typed)))
        if sets and not self._are_sets_explained:
            self._are_sets_explained = True
            self._explain_sets(plan, sets)
        return plan

    def _explain_sets(self, plan: Plan, sets: Sequence[str]) -> None:
        """Print the seeds that `--set` chose, and the axes whose values it changed."""
        content, console = plan.ablation.content, make_console(stderr=True)
        if any(assignment.startswith("seeds=") for assignment in sets):
            seeds, rows = content.row_seeds, plan.samples if plan.search else len(plan.rows)
            text = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}: {rows * len(seeds):,} runs"
            console.print(text, highlight=False, soft_wrap=True)
        for assignment, axis, number in changed_axes(plan.ablation, sets):
            text = f"--set {assignment} applies to all {number} values of the axis {axis}"
            print_note(console, text)

    def expand_recorded(self, recorded: RecordedAblation, scale: str | None = None, sets: Sequence[str] = ()) -> Plan:
        """The plan of an ablation that is in no file, with the values of `--set`. A note says where it is from."""
        loaded = recorded.ablation
        if loaded.name not in self._noted:
            self._noted.add(loaded.name)
            text = f"{self.folder} has no file {loaded.name}.yaml: this is the ablation of sweep {recorded.sweep_id}"
            print_note(make_console(stderr=True), text)
        return expand(with_overrides(loaded, scale=scale, assignments=list(sets)))

    @staticmethod
    def written(scale: str | None, sets: Sequence[str]) -> str:
        """A scale and values of `--set` as options: `--scale small --set train.steps=100`."""
        return shlex.join(option_words(scale, sets))

    def places(self, run_id: str) -> list[Place]:
        """No places: the plans of all files take too long."""
        return []


def check_places(plan: Plan) -> None:
    """Raise UserError where a run names files of this machine that its task cannot read. Opens none of them."""
    for task in {run.task for row in (*plan.rows, *plan.examples) for run in row.runs[:1]}:
        task.check_place()


def open_store(store: str, index: str | None, *, create: bool = False) -> Store:
    """The store that `--store` and `--index` name, to write to. A bar shows how far its index is made.

    Raises StoreError, also for a folder of results, which is only read.
    """
    opened = stores.open_store(store, index=index, create=create, on_indexing=indexing_bar())
    if isinstance(opened, ParquetStore):
        raise opened.refusal
    return opened


def open_queries(store: str, index: str | None, ablations: Path, *, committed: bool = False) -> Queries:
    """Answers questions about a store and ablation files.

    Args:
        store: The value of `--store`.
        index: The value of `--index`.
        ablations: The value of `--ablations`.
        committed: `--committed`: the store is the folder of results beside the ablation files.

    Raises StoreError.
    """
    if committed:
        opened: Store = ParquetStore(ablations / RESULTS)
    else:
        opened = stores.open_store(store, index=index, on_indexing=indexing_bar())
    return Queries(opened, NamedFiles(ablations))


def find_run_id(queries: Queries, text: str, scale: str | None = None, sets: Sequence[str] = ()) -> str:
    """The id of the run that a text names (`Queries.run_id`); the text itself if it names a file or an ablation.

    Raises the errors of `Queries.run_id`.
    """
    if Path(text).exists() or text in ablation_files(queries.files.folder):
        return text
    return queries.run_id(text, scale, sets)


def find_one_run(queries: Queries, text: str, scale: str | None = None, sets: Sequence[str] = ()) -> str:
    """The id of the run that a text names: its id, the first digits of it, or `ABLATION/ROW`. Raises UserError."""
    run_id = queries.run_id(text, scale, sets)
    if RUN_ID.fullmatch(run_id):
        return run_id
    try:
        plan = queries.planned(text, scale, sets)
    except NotFoundError:
        raise no_run(queries.store, text) from None
    rows = [row.name for row in plan.rows]
    raise UserError(
        f"no run {text!r}. {text} is an ablation: name one of its runs (cope-sweep runs --ablation {text}) or a row, "
        f"as in {text}/{rows[0]}",
        code="names_an_ablation",
        ablation=text,
        rows=rows[:20],
    )


def find_checkpoint(store: Store, run_or_folder: str) -> Path:
    """The checkpoint folder of a finished run, or the folder that was named. Raises UserError."""
    if not RUN_ID.fullmatch(run_or_folder):
        return Path(run_or_folder)
    folder = store.run(run_or_folder)  # its files alone say whether it is finished
    if folder.status != "finished":
        raise UserError(
            f"run {run_or_folder} is {folder.status}; only finished runs have a checkpoint",
            code="not_finished",
            run_id=run_or_folder,
            status=folder.status,
        )
    if lost := folder.lost_files():
        raise UserError(
            f"{next(iter(lost.values()))}; train it again: repeat the `cope-sweep run` of its ablation",
            code="damaged_file",
            run_id=folder.run_id,
        )
    return folder.fetch_checkpoint()
