"""Settings of the service: arguments, or the environment (`COPE_SWEEP_PORT=8080`), checked before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cope_sweep.errors import UserError

Count = Annotated[int, Field(ge=1)]


class Settings(BaseSettings):
    """Where things are, and how much one request may ask for.

    Raises UserError where a folder cannot be used, and pydantic's ValidationError for a value out of bounds.
    """

    model_config = SettingsConfigDict(env_prefix="COPE_SWEEP_", frozen=True)

    ablations: Path = Field(default=Path("ablations"), description="Folder of ablation files.")
    store: Path = Field(default=Path("store"), description="Folder of runs; it need not exist yet.")
    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0: every network's.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8000, description="0: any free one.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where models compute.")
    max_tokens: Count = Field(default=8192, description="Tokens in one perplexity request.")
    max_probe_values: Count = Field(default=1 << 20, description="Numbers in the matrices of one probe's answer.")
    max_body_bytes: Count = Field(default=1 << 20, description="Bytes in the body of a request.")
    max_models: Count = Field(default=4, description="Models kept in memory.")
    max_inferences: Count = Field(default=1, description="Requests of models computed at a time; the others wait.")
    access_log: bool = Field(default=False, description="A line for every request.")

    @model_validator(mode="after")
    def _folders_can_be_read(self) -> Self:
        _check_folder(self.ablations, "ablations", must_exist=True)
        _check_folder(self.store, "store", must_exist=False)
        return self


def _check_folder(path: Path, name: str, *, must_exist: bool) -> None:
    way_out = f"choose another with --{name}, or set COPE_SWEEP_{name.upper()}"
    if not path.exists():
        if must_exist:
            raise UserError(f"the {name} folder {path.absolute()} does not exist; {way_out}")
    elif not path.is_dir():
        raise UserError(f"{path.absolute()} is not a folder, so it cannot be the {name} folder; {way_out}")
    elif not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"the {name} folder {path.absolute()} cannot be read; {way_out}")
