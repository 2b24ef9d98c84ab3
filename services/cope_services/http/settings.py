"""Settings of the service, from arguments or from environment variables such as `COPE_SWEEP_PORT=8080`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from cope_sweep.config.source import ablations_folder
from cope_sweep.errors import UserError
from cope_sweep.store.provenance import usable_cpus

ENV_PREFIX = "COPE_SWEEP_"

Work = Literal[
    "looks", "answers", "tables", "drawings", "reports", "exports", "downloads", "sweeps", "listeners", "models"
]
"""Kinds of work that requests cause."""


@dataclass(frozen=True)
class Limit:
    """How many requests for one kind of work are answered and wait at a time. Others get 429."""

    running: int
    waiting: int
    retry_after_s: int
    """Seconds after which a refused client should try again."""


LIMITS: Mapping[Work, Limit] = {
    "looks": Limit(running=4, waiting=512, retry_after_s=1),
    "answers": Limit(running=8, waiting=512, retry_after_s=1),
    "tables": Limit(running=2, waiting=32, retry_after_s=5),
    "drawings": Limit(running=1, waiting=31, retry_after_s=5),
    "reports": Limit(running=2, waiting=4, retry_after_s=10),
    "exports": Limit(running=2, waiting=6, retry_after_s=10),
    "downloads": Limit(running=32, waiting=64, retry_after_s=5),
    "sweeps": Limit(running=4, waiting=32, retry_after_s=5),
    "listeners": Limit(running=100, waiting=0, retry_after_s=10),
    "models": Limit(running=512, waiting=0, retry_after_s=2),
}
"""The limit of each kind of work; `max_listeners` replaces one. A request counts until its last byte is sent.

looks      at the index, for the ETag of an answer that may be in the cache
answers    short ones from the index or the files of one run
tables     what is computed from all runs of an ablation: tables, plans, curves, claims, differences
drawings   figures, and images of probes: matplotlib draws one at a time
reports    with their figures: each may take seconds of a core and 100 MB
exports    of any number of runs
downloads  and digests of checkpoint files
sweeps     submissions, previews, stops and retries
listeners  that follow the progress of sweeps
models     perplexity, probes, completions, tokenizers; `models.batching` also limits their tokens
"""


def _without_brackets(host: str) -> str:
    """`::1` for `[::1]`, the form in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


class Settings(BaseSettings):
    """Folders, address and limits of the service. They are checked before the server starts.

    Raises UserError for an unusable folder, and pydantic's ValidationError for an invalid value; see `load_settings`.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    ablations: Annotated[Path, AfterValidator(ablations_folder)] = Field(
        default=Path("ablations"),
        description="Folder of the ablation files. Without a folder `ablations`: the installed files.",
    )
    store: Annotated[str, BeforeValidator(str)] = Field(
        default="store", description="Folder or object store of the runs; it need not exist yet."
    )
    index: str = Field(default="", description="URL of the index's database; empty: SQLite in the store.")
    host: Annotated[str, AfterValidator(_without_brackets)] = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 is every IPv4 interface."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8000, description="Port; 0 chooses a free port.")
    allow_hosts: str = Field(
        default="",
        description="Host names that clients may use besides the address, separated by commas.",
    )
    keys_file: Path = Field(default=Path("keys.txt"), description="File of the API keys.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Device of the models.")
    max_tokens: PositiveInt = Field(
        default=8192, description="Maximum number of tokens in one sequence, window or probe."
    )
    max_request_tokens: PositiveInt = Field(
        default=1 << 16,
        description="Maximum number of tokens that models read for one request; overlaps of windows count.",
    )
    max_scored_values: PositiveInt = Field(
        default=1 << 20,
        description="Maximum number of log-probabilities and labels of tokens in one answer about perplexity.",
    )
    max_queue_tokens: PositiveInt = Field(default=1 << 18, description="Maximum number of tokens in all open requests.")
    max_seconds: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=300, description="Time limit of one inference, in seconds."
    )
    max_probe_values: PositiveInt = Field(
        default=1 << 20, description="Maximum number of values in the matrices of one probe."
    )
    max_plan_runs: PositiveInt = Field(
        default=100_000, description="Maximum number of runs of an ablation at one scale."
    )
    max_body_bytes: PositiveInt = Field(default=1 << 20, description="Maximum size of a request body.")
    max_model_bytes: PositiveInt = Field(
        default=4 << 30, description="Maximum size of the models that stay in memory between requests."
    )
    max_inferences: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Batches and probes computed at a time; 0: one per core, at most 4."
    )
    ray_address: str = Field(
        default="", description="Dashboard of the Ray cluster that trains submitted sweeps; empty: sweeps are refused."
    )
    max_sweeps: PositiveInt = Field(default=8, description="Maximum number of active submitted sweeps.")
    max_sweep_runs: PositiveInt = Field(default=10_000, description="Maximum number of runs of a submitted sweep.")
    max_listeners: PositiveInt = Field(
        default=100, description="Maximum number of clients that follow the progress of sweeps."
    )
    access_log: bool = Field(default=False, description="Log one line per request.")

    @property
    def limits(self) -> Mapping[Work, Limit]:
        """The limits of all kinds of work."""
        return {**LIMITS, "listeners": replace(LIMITS["listeners"], running=self.max_listeners)}

    def inferences(self) -> int:
        """Batches and probes computed at a time."""
        return self.max_inferences or min(4, usable_cpus())

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """The names in `allow_hosts`."""
        return tuple(name.strip() for name in self.allow_hosts.split(",") if name.strip())

    def hide_folders(self, text: str) -> str:
        """A message for clients, without the parents of the service's folders: `store/x` for `/srv/data/store/x`."""
        for prefix in self._hidden:
            text = text.replace(prefix, "")
        return text

    @cached_property
    def _hidden(self) -> list[str]:
        folders = [self.ablations, *(() if "://" in self.store else (Path(self.store),))]
        parents = {parent for folder in folders for parent in (folder.absolute().parent, folder.resolve().parent)}
        # Longest first: one folder may be within another.
        return sorted((f"{parent}/" for parent in parents if parent != Path("/")), key=len, reverse=True)

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        _check_folder(self.ablations, "ablations", must_exist=True)
        if "://" not in self.store:
            _check_folder(Path(self.store), "store", must_exist=False)
        return self


def load_settings(**values: Any) -> Settings:
    """Settings from `values` and, for the others, from the environment. Raises UserError for an invalid value."""
    try:
        return Settings(**values)
    except ValidationError as error:
        names = [f"{ENV_PREFIX}{str(item['loc'][0]).upper()}" for item in error.errors()]
        raise UserError("; ".join(map(_problem, error.errors())), code="invalid_setting", names=names) from error


def _problem(error: ErrorDetails) -> str:
    """A pydantic error in plain words: `COPE_SWEEP_PORT=99999: must be 65535 or less; …`."""
    value, context = error["input"], error.get("ctx", {})
    expected = {
        "int_parsing": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_parsing": "must be a number",
        "bool_parsing": "must be true or false",
        "greater_than": f"must be greater than {context.get('gt')}",
        "greater_than_equal": f"must be {context.get('ge')} or more",
        "less_than_equal": f"must be {context.get('le')} or less",
        "literal_error": f"must be {context.get('expected')}",
    }.get(error["type"], error["msg"][0].lower() + error["msg"][1:])
    name = str(error["loc"][0])
    default = Settings.model_fields[name].get_default()
    variable, shown_value = f"{ENV_PREFIX}{name.upper()}", str(value)[:100]
    return f"{variable}={shown_value}: {expected}; unset it to use the default, {str(default) or 'none'}"


def _check_folder(path: Path, name: str, *, must_exist: bool) -> None:
    advice = f"choose another with --{name} or {ENV_PREFIX}{name.upper()}"
    if not path.exists():
        if must_exist:
            raise UserError(
                f"the {name} folder {path.absolute()} does not exist; {advice}",
                code="no_such_folder",
                folder=str(path.absolute()),
            )
    elif not path.is_dir():
        raise UserError(
            f"{path.absolute()} is not a folder, so it cannot be the {name} folder; {advice}",
            code="not_a_folder",
            folder=str(path.absolute()),
        )
    elif not os.access(path, os.R_OK | os.X_OK):
        raise UserError(
            f"the {name} folder {path.absolute()} cannot be read; {advice}",
            code="unreadable_folder",
            folder=str(path.absolute()),
        )
