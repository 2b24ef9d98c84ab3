"""Readable messages for validation errors: the key, the value, what would be accepted, and the likely intent."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from cope_sweep.config.source import DECIMAL_COMMA, KeyPath
from cope_sweep.errors import JsonValue, UserError
from cope_sweep.registry import Registry

EXPECTED_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
"""Type of a pydantic error → what was expected."""

SYNONYMS: dict[str, tuple[str, ...]] = {
    "layers": ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth", "blocks"),
    "dim": ("d_model", "n_embd", "hidden", "hidden_dim", "hidden_size", "embed_dim", "embedding_dim", "width"),
    "heads": ("n_head", "n_heads", "num_heads", "num_attention_heads", "attention_heads"),
    "ffn_dim": ("d_ff", "ff_dim", "d_ffn", "mlp_dim", "mlp_hidden", "feed_forward_dim", "intermediate_size"),
    "context": ("block_size", "seq_len", "sequence_length", "max_seq_len", "max_length", "n_ctx", "context_length"),
    "dropout": ("p_drop", "resid_pdrop", "attn_pdrop"),
    "tied": ("tie_weights", "tie_embeddings", "tie_word_embeddings"),
    "position": ("pos_emb", "position_encoding", "positional_encoding", "encodings"),
    "steps": ("max_steps", "num_steps", "n_steps", "iterations", "max_iters", "updates", "max_train_steps"),
    "batch": ("batch_size", "train_batch_size", "bs"),
    "optimizer": ("optim", "optimiser"),
    "lr": ("learning_rate", "learningrate", "step_size", "alpha"),
    "betas": ("beta", "adam_betas", "beta1", "beta2", "adam_beta1", "adam_beta2"),
    "eps": ("epsilon", "adam_eps", "adam_epsilon"),
    "weight_decay": ("wd", "decay", "l2"),
    "warmup": ("warmup_steps", "num_warmup_steps", "warmup_iters"),
    "schedule": ("scheduler", "lr_scheduler", "lr_schedule", "lr_scheduler_type"),
    "clip": ("grad_clip", "gradient_clip", "grad_norm", "max_grad_norm", "clip_grad_norm", "gradient_clip_val"),
    "every": ("eval_every", "eval_interval", "eval_steps", "interval"),
    "seeds": ("seed", "random_seed", "random_seeds"),
    "cpus": ("num_cpus", "n_cpus", "cores"),
    "gpus": ("num_gpus", "n_gpus"),
    "workers": ("num_workers", "n_workers", "world_size"),
}
"""Key of an ablation file → what other libraries call it."""

PLUGGED = frozenset({"task", "position", "family", "optimizer", "figures"})
"""Keys, in places of errors, whose kinds a plugin may bring."""
NEAR_NAMES = 3
"""Names that a hint lists."""
MAX_VALUE_LENGTH = 60
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class SpecProblem:
    """What is wrong with a value: its key path in the file, and message, code and data of the error about it."""

    path: KeyPath
    message: str
    code: str = "invalid_value"
    data: Mapping[str, JsonValue] = field(default_factory=dict)


def explain_all(error: ValidationError, model: type[BaseModel]) -> list[SpecProblem]:
    """The problems of a validation error. A value that matches none of several types is one problem."""
    problems: dict[KeyPath, SpecProblem] = {}
    messages: dict[KeyPath, dict[str, None]] = {}
    for item in error.errors(include_url=False):
        problem = explain(item, model)
        message = problem.message
        if problem.path in problems and item["type"] == "literal_error" and not isinstance(item["input"], str):
            message = " or ".join(_choices(item))  # after what is wrong with it as a number
        problems.setdefault(problem.path, problem)
        messages.setdefault(problem.path, {})[message] = None
    return [replace(problem, message=", or ".join(messages[path])) for path, problem in problems.items()]


def invalid_request(error: ValidationError, model: type[BaseModel]) -> UserError:
    """The first problem of a question or the body of a request, as an error."""
    problem = explain_all(error, model)[0]
    key = ".".join(map(str, problem.path))
    message = f"{key}: {problem.message}" if key else problem.message
    return UserError(message, code="invalid_request", **{**problem.data, "key": key})


def explain(error: Any, model: type[BaseModel]) -> SpecProblem:
    """The problem that one item of pydantic's `ValidationError.errors()` means.

    `model` is the class that was validated.
    """
    location = tuple(error["loc"])
    error_type, value = error["type"], error.get("input")
    annotations, path = _resolve(model, location)
    if error_type == "extra_forbidden":
        models = [model_class for model_class in _resolve(model, location[:-1])[0] if _is_model(model_class)]
        names = sorted({name for model_class in models for name in model_class.model_fields})
        message = f"unknown key {path[-1]!r}" + suggest(str(path[-1]), names)
        return SpecProblem(path, message, "unknown_key", {"key": path[-1], "allowed": names})
    if error_type == "missing":
        return SpecProblem(path[:-1], f"the key {path[-1]!r} is missing", "missing_key", {"key": path[-1]})
    if error_type == "union_tag_invalid":
        kind, kinds = error["ctx"]["tag"], _quoted_names(error["ctx"]["expected_tags"])
        kind_written = value["kind"] if isinstance(value, Mapping) else kind
        if isinstance(kind_written, str):
            message = f"unknown kind {kind!r}" + suggest(kind, kinds)
            if (not PLUGGED.isdisjoint(path) or path[-2:] == ("train", "schedule")) and not closest(kind, kinds):
                message += "; is it in a plugin that is not loaded (`plugins`, COPE_SWEEP_PLUGINS)?"
        else:  # 1.10 is the number 1.1 in YAML
            hint = "; quote it" if isinstance(kind_written, int | float) else ""
            message = f"the kind {_shown(kind_written)} is not text{hint}{suggest(str(kind_written), kinds)}"
        return SpecProblem(path, message, "unknown_kind", {"kind": kind, "allowed": kinds})
    if error_type == "union_tag_not_found":
        kinds = [kind for kind in map(_kind, filter(_is_model, annotations)) if kind]
        return SpecProblem(
            path, f"{_shown(value)} has no `kind`" + suggest("", kinds), "missing_kind", {"allowed": kinds}
        )
    if error_type == "literal_error":
        message = f"{_shown(value)} is not one of the choices" + suggest(str(value), _choices(error))
        return SpecProblem(path, message, "unknown_choice", {"value": _shown(value), "allowed": _choices(error)})
    if error_type == "value_error":
        reason = error["ctx"]["error"]
        if isinstance(reason, UserError):
            return SpecProblem(path, str(reason), reason.code, reason.data)
        return SpecProblem(path, str(reason))
    if error_type in EXPECTED_TYPES:
        hint = ""
        if EXPECTED_TYPES[error_type] == "a list" and value not in (None, ""):
            hint = f"; write [{value if isinstance(value, str) else _shown(value)}]"
        expected = EXPECTED_TYPES[error_type]
        if expected == "text" and isinstance(value, int | float):
            hint = "; quote it"
        if expected in ("a number", "a whole number") and DECIMAL_COMMA.fullmatch(str(value)):
            hint = f"; write it with a point: {str(value).replace(',', '.')}"
        message = f"{_shown(value)} is not {expected}{hint}"
        return SpecProblem(path, message, "wrong_type", {"value": _shown(value), "expected": expected})
    message = error["msg"][0].lower() + error["msg"][1:]
    return SpecProblem(path, f"{_shown(value)}: {message}", data={"value": _shown(value)})


def suggest(name: str, accepted: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean 'x'? accepted: x, y`. Empty if none is accepted.

    The accepted name that `name` is a synonym of is proposed, or else the most similar one, whatever its case; of names
    that differ in case only, the first.
    """
    accepted = list(accepted)
    if not accepted:
        return ""
    match = closest(name, accepted)
    hint = f"; did you mean {match!r}?" if match else ";"
    return f"{hint} accepted: {', '.join(accepted)}"


def closest(name: str, accepted: Sequence[str]) -> str | None:
    """The accepted name that `suggest` proposes; None if none is similar."""
    folded = name.casefold()
    matches = [candidate for candidate in accepted if folded.replace("-", "_") in SYNONYMS.get(candidate, ())]
    if not matches:
        # Reversed: if names differ only in case, the first of them wins.
        by_folded = {candidate.casefold(): candidate for candidate in reversed(accepted)}
        matches = [by_folded[candidate] for candidate in difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.5)]
    return matches[0] if matches else None


def near_names(name: str, accepted: Iterable[str]) -> list[str]:
    """The accepted dotted names that `name` may mean: first names whose last part is a synonym, then similar ones."""
    accepted = list(accepted)
    start, dot, last = name.rpartition(".")
    meant = [f"{start}{dot}{own}" for own, others in SYNONYMS.items() if last.casefold() in others]
    near = [
        *(candidate for candidate in meant if candidate in accepted),
        *difflib.get_close_matches(name, accepted, n=NEAR_NAMES),
    ]
    return list(dict.fromkeys(near))[:NEAR_NAMES]


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + "…"


def _choices(error: Any) -> list[str]:
    # Pydantic gives them as one text: `'a', 'b' or 'c'`.
    return _quoted_names(error["ctx"]["expected"].replace(" or ", ", "))


def _quoted_names(text: str) -> list[str]:
    """The names in pydantic's `'a', 'b'`."""
    return [part.strip().strip("'") for part in text.split(",")]


def _resolve(model: type[BaseModel], location: KeyPath) -> tuple[list[Any], KeyPath]:
    """The possible types at a pydantic error location, and the location as a key path of the file.

    Pydantic's locations also hold the tags and member names of unions, which are not keys of the file.
    """
    annotations: list[Any] = [model]
    path: list[str | int] = []
    for part in location:
        inner, is_tag = _descend(annotations, part)
        # A part that names neither a field nor a tag is the name that pydantic gives a member of a union.
        is_member_name = not inner and isinstance(part, str) and annotations and not any(map(_is_model, annotations))
        if is_member_name:
            continue
        annotations = inner
        if not is_tag:
            path.append(part)
    return annotations, tuple(path)


def _descend(annotations: list[Any], part: str | int) -> tuple[list[Any], bool]:
    """The possible types one location part below `annotations`, and whether the part is the tag of a union."""
    models = [annotation for annotation in annotations if _is_model(annotation)]
    tagged = [model for model in models if _kind(model) == part]
    if tagged and len(models) > 1:
        return tagged, True
    inner: list[Any] = []
    # Of a list or a mapping, the part is the name of a member: `list[any]`.
    of_list = any(get_origin(annotation) is list for annotation in annotations)
    for annotation in annotations:
        if _is_model(annotation) and part in annotation.model_fields:
            field = annotation.model_fields[part]
            inner += _alternatives(field.annotation, field.metadata)
        elif get_origin(annotation) in (tuple, list) and isinstance(part, int):
            inner += _alternatives(get_args(annotation)[0])
        elif get_origin(annotation) is dict and isinstance(part, str) and not of_list:
            inner += _alternatives(get_args(annotation)[1])
    return inner, False


def _alternatives(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[Any]:
    """The classes of a registry in `metadata`, the members of a union, or the annotation itself."""
    registry = next((item for item in metadata if isinstance(item, Registry)), None)
    if registry is not None:
        yield from registry.choices().values()
    elif get_origin(annotation) is Annotated:
        inner, *inner_metadata = get_args(annotation)
        yield from _alternatives(inner, inner_metadata)
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _kind(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return field.default if field and isinstance(field.default, str) else None
