"""The specification of one run, fully resolved, and the run id, which is a hash of its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count, takewhile
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    Strict,
    WithJsonSchema,
    model_validator,
)

from cope_sweep.config.keys import ENCODINGS_KEY, is_below, is_field
from cope_sweep.errors import InvalidValue
from cope_sweep.families import GPT2, AnyFamily, Declarations, ModelSizes, OutputGate, attention_parameters
from cope_sweep.frozen import Amount, Count, Frozen, Positive
from cope_sweep.optim import AdamW, AnyOptimizer, AnySchedule, Constant, OptimizerSettings
from cope_sweep.positions import ENCODINGS, AnyEncoding, Dims, Encoding, check_together
from cope_sweep.positions.registered import is_read
from cope_sweep.registry import Kind
from cope_sweep.tasks import TASKS, VALIDATION, AnyTask

Fraction = Annotated[float, Field(ge=0, lt=1)]


NUMERIC_FACTS = (
    "parameters",
    "tokens_per_s",
    "model_flops_per_s",
    "mfu",
    "peak_memory_bytes",
    "train_s",
    "wall_s",
    "largest_position",
)
"""Facts of a finished run that are numbers."""
FACT_METRICS = tuple(f"facts.{name}" for name in NUMERIC_FACTS)
"""Their names in tables and figures: `facts.tokens_per_s`."""


POSITION_PERPLEXITY = "position_perplexity"
"""The measure of `evaluate.positions`."""
BY_PLACE = {
    POSITION_PERPLEXITY: "place in the context (tokens)",
    "position_error": "place in the sequence (tokens)",
    "distance_error": "distance (tokens)",
}
"""Measure whose `@N` is the end of a range of places or distances, not a length → what N is."""


class ModelSpec(Frozen):
    """A decoder-only transformer and its list of position encodings."""

    family: AnyFamily = Field(default=GPT2(), description="Norms, activation and biases of the blocks.")
    layers: Annotated[int, Field(ge=1, le=10_000)] = Field(default=2, description="Number of transformer blocks.")
    dim: Positive = Field(default=64, description="Width of the model; `heads` divides it.")
    heads: Positive = Field(default=2, description="Attention heads in each layer.")
    ffn_dim: Positive | None = Field(
        default=None, description="Hidden units of the feed-forward net; null: 4 × dim (llama: 8/3 × dim)."
    )
    context: Positive | None = Field(default=None, description="Longest sequence in tokens; null: the task's longest.")
    dropout: Fraction = Field(default=0.0, description="Probability of dropout.")
    tied: bool = Field(default=True, description="The output layer uses the weights of the token embedding.")
    hard_attention: bool = Field(
        default=False,
        description="Attend only to the token with the largest logit; the gradient is taken from the softmax.",
    )
    output_gate: OutputGate | None = Field(
        default=None,
        description="Multiply the output of attention by σ(G·x), x the layer's input, before the output projection. "
        "channel: a gate for each component; head: one for each head; null: none.",
    )
    qk_norm: bool = Field(
        default=False,
        description="An RMSNorm of each head's queries and keys, with learned gains that heads share, before encodings "
        "use them.",
    )
    position: Annotated[tuple[AnyEncoding, ...], Strict(False)] = Field(
        default=(),
        description="Position encodings, which add up. Empty: none. Their order changes the run's id, but not "
        "the model: keep to one order.",
    )

    @property
    def feed_forward_dim(self) -> int:
        """The number of hidden units of the feed-forward net: `ffn_dim`, or the family's default."""
        return self.family.default_feed_forward_dim(self.dim) if self.ffn_dim is None else self.ffn_dim

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.dim % self.heads:
            # Near the number that was given: a dim with a few digits too many must not take minutes to refuse.
            candidates = range(max(1, self.heads - 1000), min(self.dim, self.heads + 1000) + 1)
            near = sorted(sorted((h for h in candidates if self.dim % h == 0), key=lambda h: abs(h - self.heads))[:3])
            raise InvalidValue(
                f"model.heads = {self.heads} does not divide model.dim = {self.dim}; "
                f"heads that do: {', '.join(map(str, near)) or 1}",
                key="model.heads",
                value=self.heads,
                allowed=near,
            )
        return self


class TrainSpec(Frozen):
    """Optimiser, learning rate and batches."""

    steps: Positive = Field(default=1000, description="Number of training steps; `tokens` may give it.")
    tokens: Amount | None = Field(
        default=None,
        description="Number of training tokens, instead of `steps`: 20k, 300M, 1.5B. It becomes a number of steps, "
        "rounded up, before the run gets its id.",
    )
    batch: Positive = Field(default=64, description="Sequences in a step, summed over the workers.")
    optimizer: AnyOptimizer = Field(default=AdamW(), description="What updates the parameters.")
    lr: Annotated[float, Field(gt=0)] = Field(default=1e-3, description="Learning rate after the warm-up.")
    position_lr: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Factor on the learning rate of the encodings' parameters, with any optimiser."
    )
    betas: Annotated[tuple[Fraction, Fraction], Strict(False)] = Field(default=(0.9, 0.999), description="Of AdamW.")
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="Of AdamW.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01, description="Of matrices; biases, norms and position parameters have none."
    )
    warmup: Count = Field(default=0, description="Steps of linear warm-up.")
    schedule: AnySchedule = Field(
        default=Constant(), description="The learning rate after the warm-up: constant, or falling to 0 at the end."
    )
    clip: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0, description="Largest gradient norm; null: no clipping."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_budget(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "steps" in data and data.get("tokens") is not None:
            raise InvalidValue(
                f"train.steps = {data['steps']} and train.tokens = {data['tokens']} are both set; remove one of them",
                code="two_budgets",
                key="train.tokens",
            )
        return data

    @property
    def optimizer_settings(self) -> OptimizerSettings:
        """The settings that every optimiser receives."""
        return OptimizerSettings(self.lr, self.betas, self.eps, self.weight_decay, self.position_lr)

    @property
    def learning_rates(self) -> dict[str, float]:
        """The full learning rates by the name under which a curve shows them; the schedule applies to each."""
        positions = {} if self.position_lr == 1 else {"train/lr_positions": self.lr * self.position_lr}
        return self.optimizer.rates(self.lr) | positions

    def learning_rate(self, lr: float, step: int) -> float:
        """The learning rate of step `step` (1 … `steps`) of a parameter group whose full rate is `lr`."""
        return self.schedule.rate(lr, step, steps=self.steps, warmup=self.warmup)


def _nested(variants: Any) -> Any:
    """`{capped: {relative.far: last}}` as `{capped: {relative: {far: last}}}`; other values unchanged."""
    if not isinstance(variants, Mapping):
        return variants
    nested: dict[str, Any] = {}
    for name, changes in variants.items():
        if not isinstance(changes, Mapping):
            return variants
        nested[name] = {}
        for key, value in changes.items():
            kind, dot, field = str(key).partition(".")
            if not dot and not isinstance(value, Mapping):
                return variants
            nested[name].setdefault(kind, {}).update({field: value} if dot else value)
    return nested


Variants = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")],
        # Either form is accepted: `relative: {far: last}` and `relative.far: last`.
        Annotated[dict[str, dict[str, JsonValue]], WithJsonSchema({"type": "object"})],
    ],
    BeforeValidator(_nested),
]


class EvaluateSpec(Frozen):
    """The steps at which the test sets are evaluated, and the number of their sequences."""

    every: Positive = Field(default=100, description="Steps between evaluations. The last step is always evaluated.")
    sequences: Positive = Field(default=256, description="Sequences of each test set in an evaluation.")
    final_sequences: Positive = Field(
        default=1024, description="Sequences of each test set in the evaluation after the last step."
    )
    validation: bool = Field(
        default=False,
        description="For generated tasks: also evaluate a validation set, which has other sequences of the kind of the "
        "training ones. Searches and schedules then choose by it, and not by a test set that the table reports.",
    )
    contexts: Annotated[tuple[Positive, ...], Strict(False)] = Field(
        default=(),
        description="For tasks that read a text: window lengths in tokens. After the last step, the test sets are "
        "also evaluated on windows of these lengths (`validation/perplexity@2048`). Lengths beyond the training "
        "length show length generalisation.",
    )
    lengths: Annotated[tuple[Annotated[int, Field(ge=2, le=1024)], ...], Strict(False)] = Field(
        default=(),
        description="For tasks that generate sequences: multiples of the trained length. After the last step, the "
        "first test set is also evaluated with sequences this many times as long (`in_dist/token_error@4x`).",
    )
    positions: Positive | None = Field(
        default=None,
        description="For tasks that read a text: a window length in tokens. After the last step, the perplexity of the "
        "test sets is also measured by the place in such windows (`validation/position_perplexity@64`: of the 33rd to "
        "64th token). null: it is not.",
    )
    stride: Positive | None = Field(
        default=None,
        description="Tokens from the start of one window to the start of the next; null: the window length, so that "
        "windows are disjoint. A smaller stride gives every scored token more context and costs more time.",
    )
    variants: Variants = Field(
        default={},
        description="Other readings of the trained model, by name: fields of its encodings that hold in an evaluation "
        "only. `{capped: {relative.far: last}}` measures `capped/test/perplexity` beside `test/perplexity`, after the "
        "last step, at all contexts. Fields that change parameters are not allowed.",
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # `variants` is a dictionary

    @property
    def position_ends(self) -> tuple[int, ...]:
        """The last place of each stretch that `positions` measures: 16, 32, 64, … and the length of the window."""
        if self.positions is None:
            return ()
        lengths = takewhile(lambda end: end < (self.positions or 0), (16 << power for power in count()))
        return (*lengths, self.positions)

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        for key, values in (("contexts", self.contexts), ("lengths", self.lengths)):
            if twice := [value for value in values if values.count(value) > 1]:
                raise InvalidValue(
                    f"evaluate.{key} has {twice[0]} twice; remove one", key=f"evaluate.{key}", value=twice[0]
                )
        if self.stride is not None and not self.contexts:
            raise InvalidValue(
                "evaluate.stride has no effect without evaluate.contexts (the windows of evaluate.positions are "
                "disjoint); set contexts, or remove it",
                code="no_effect",
                key="evaluate.stride",
            )
        if self.stride is not None and self.stride > min(self.contexts):
            raise InvalidValue(
                f"evaluate.stride = {self.stride} leaves out tokens; set it to at most the shortest of "
                f"evaluate.contexts, {min(self.contexts)}",
                key="evaluate.stride",
                value=self.stride,
                largest=min(self.contexts),
            )
        return self


DROPOUT_VERSION = 2
"""Version of the masks. 2: they are a function of a sequence's number, not of how a batch is divided."""


class RunSpec(Frozen):
    """One training: task, model, optimiser, evaluation and seed. Its content decides its run id."""

    task: AnyTask
    model: ModelSpec = ModelSpec()
    train: TrainSpec = TrainSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @model_validator(mode="wrap")
    @classmethod
    def _resolve_tokens(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """The run with the number of steps that a budget in tokens gives."""
        run = handler(data)
        if run.train.tokens is None:
            return run
        # Rounded up. A second validation, and no copy, so that the checks see the number of steps.
        steps = -(-run.train.tokens // (run.train.batch * run.task.length("train")))
        train = {name: getattr(run.train, name) for name in run.train.model_fields_set - {"tokens"}}
        return handler(
            {name: getattr(run, name) for name in run.model_fields_set} | {"train": train | {"steps": steps}}
        )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.model.context is not None and self.model.context < self.task.context:
            raise InvalidValue(
                f"model.context = {self.model.context} is shorter than the task's longest sequence, "
                f"{self.task.context} tokens; remove it or raise it",
                key="model.context",
                value=self.model.context,
                smallest=self.task.context,
            )
        for key in ("contexts", "positions"):
            if getattr(self.evaluate, key) and not self.task.has_windows:
                raise InvalidValue(
                    f"evaluate.{key} applies to windows over a text, but {self.task.kind} generates sequences; remove "
                    "it (evaluate.lengths gives longer sequences)",
                    key=f"evaluate.{key}",
                    task=self.task.kind,
                )
        if self.evaluate.lengths and not self.task.LENGTHS:
            raise InvalidValue(
                f"evaluate.lengths = {list(self.evaluate.lengths)}: the task {self.task.kind} has no longer sequences; "
                "remove it" + (", and set evaluate.contexts instead" if self.task.has_windows else ""),
                key="evaluate.lengths",
                task=self.task.kind,
            )
        for times in self.evaluate.lengths:
            self.task.longer(times)  # raises ValueError where it has no such sequences
        if self.evaluate.validation and VALIDATION not in self.task.splits:
            raise InvalidValue(
                f"evaluate.validation: the task {self.task.kind} has no validation set; remove it",
                key="evaluate.validation",
                task=self.task.kind,
            )
        # With a budget in tokens, `steps` is still its default here; `_resolve_tokens` validates once more.
        if self.train.tokens is None and self.train.warmup > self.train.steps:
            raise InvalidValue(
                f"train.warmup = {self.train.warmup} is more than train.steps = {self.train.steps}",
                key="train.warmup",
                value=self.train.warmup,
                largest=self.train.steps,
            )
        check_together(self.model.position, self.dims)
        if self.model.qk_norm and not any(is_read(None, self.model.position, n) for n in range(self.model.layers)):
            raise InvalidValue(
                "model.qk_norm has no effect: mapformer_em with product: s replaces q·k, and no other encoding reads "
                "queries or keys; remove it",
                code="no_effect",
                key="model.qk_norm",
            )
        if self.train.position_lr != 1 and not self._learns_positions():
            raise InvalidValue(
                f"train.position_lr = {self.train.position_lr:g}: no encoding of the model has parameters to learn; "
                "set it only for runs with one that has (`when` in an ablation file)",
                key="train.position_lr",
                value=self.train.position_lr,
            )
        for name in self.evaluate.variants:
            self._check_variant(name)
        return self

    def _learns_positions(self) -> bool:
        declared = (encoding.parameters(self.dims).values() for encoding in self.model.position)
        return any(parameter.learned for parameters in declared for parameter in parameters)

    def _check_variant(self, name: str) -> None:
        if name in self.task.splits:
            raise InvalidValue(
                f"evaluate.variants.{name} has the name of a split of {self.task.kind}; choose another",
                code="variant_of_split",
                key=f"evaluate.variants.{name}",
            )
        changed = self.variant(name)
        check_together(changed, self.dims)
        if changed == self.model.position:
            raise InvalidValue(
                f"evaluate.variants.{name} changes nothing; remove it, or set fields to other values",
                code="no_effect",
                key=f"evaluate.variants.{name}",
            )
        layers = range(self.model.layers)
        for before, after in zip(self.model.position, changed, strict=True):
            declared = after.parameters(self.dims)
            has_more_layers = any(after.serves(layer) and not before.serves(layer) for layer in layers)
            lacks_parameters = has_more_layers and any(parameter.per_layer for parameter in declared.values())
            if lacks_parameters or declared != before.parameters(self.dims):
                raise InvalidValue(
                    f"evaluate.variants.{name} changes the parameters of {before.kind}, which are trained once; "
                    "change only fields that keep them, or train another run",
                    code="variant_of_parameters",
                    key=f"evaluate.variants.{name}",
                    kind=before.kind,
                )

    def variant(self, name: str) -> tuple[Encoding, ...]:
        """The encodings of the model as `evaluate.variants` changes them. Raises ValueError."""
        changes = self.evaluate.variants[name]
        kinds = [encoding.kind for encoding in self.model.position]
        for kind, fields in changes.items():
            where = f"evaluate.variants.{name}.{kind}"
            if kind not in kinds:
                raise InvalidValue(
                    f"{where}: model.position has {', '.join(kinds) or 'no encoding'}, and no {kind}; give the variant "
                    "only to runs with it (`when` in an ablation file)",
                    code="variant_of_no_encoding",
                    key=where,
                    kind=kind,
                )
            if unknown := sorted(fields.keys() - (ENCODINGS[kind].model_fields.keys() - {"kind"})):
                raise InvalidValue(
                    f"{where} has no field {unknown[0]!r}", code="unknown_key", key=where, field=unknown[0]
                )
        return tuple(
            ENCODINGS.validate(encoding.model_dump() | changes[encoding.kind]) if encoding.kind in changes else encoding
            for encoding in self.model.position
        )

    def _variants_as_read(self) -> dict[str, dict[str, dict[str, Any]]]:
        """`evaluate.variants` as values of the encodings' fields, without those that the trained model has, too."""
        read: dict[str, dict[str, dict[str, Any]]] = {}
        for name, changes in self.evaluate.variants.items():
            of_kinds = read[name] = {}
            for before, after in zip(self.model.position, self.variant(name), strict=True):
                for field in changes.get(after.kind, ()):
                    value = getattr(after, field)
                    if value != getattr(before, field):
                        # `factor: 2` as it is mostly written: runs that have it in their id keep it.
                        is_whole = isinstance(value, float) and value.is_integer()
                        of_kinds.setdefault(after.kind, {})[field] = int(value) if is_whole else value
        return read

    @property
    def dims(self) -> Dims:
        """The sizes that position encodings depend on."""
        model = self.model
        return Dims(
            model.dim,
            model.heads,
            model.layers,
            model.context or self.task.context,
            model.family.absolute_std(model.dim),
            model.family.linear_bound(model.dim),
        )

    @property
    def sizes(self) -> ModelSizes:
        """The sizes that the shapes of the family's parameters depend on."""
        model = self.model
        return ModelSizes(self.task.vocabulary_size, model.dim, model.layers, model.feed_forward_dim, model.tied)

    @property
    def attention_parameters(self) -> Declarations:
        """The declarations of what `output_gate` and `qk_norm` add to each block of the model's family."""
        model = self.model
        return attention_parameters(
            model.family, dim=model.dim, heads=model.heads, output_gate=model.output_gate, qk_norm=model.qk_norm
        )

    @property
    def training_tokens(self) -> int:
        """Number of tokens that the run is trained on, as its model reads them."""
        return self.train.steps * self.train.batch * self.task.length("train")

    @property
    def test_sets(self) -> tuple[str, ...]:
        """The splits that are evaluated."""
        return tuple(dict.fromkeys((*self.task.TESTS, *([VALIDATION] if self.evaluate.validation else []))))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of a finished run's metrics: `test/perplexity`, `test/perplexity@2048`, `train/loss`."""
        return (*self._final_metrics(""), *self.variant_metrics, "train/loss")

    @property
    def variant_metrics(self) -> tuple[str, ...]:
        """The metrics of `evaluate.variants`, which begin with the variant's name: `capped/test/perplexity@2048`."""
        return tuple(name for variant in self.evaluate.variants for name in self._final_metrics(f"{variant}/"))

    def _final_metrics(self, prefix: str) -> Iterator[str]:
        suffixes = ("", *(f"@{context}" for context in self.evaluate.contexts))
        lengths = tuple(f"@{times}x" for times in self.evaluate.lengths)
        for split in self.test_sets:
            longer = lengths if split == self.task.TESTS[0] else ()
            yield from (
                f"{prefix}{split}/{name}{at}"
                for at in (*suffixes, *longer)
                for name in self.task.metrics(split)
                if not at or "@" not in name
            )
            yield from (f"{prefix}{split}/{POSITION_PERPLEXITY}@{end}" for end in self.evaluate.position_ends)

    @property
    def metrics_in_training(self) -> tuple[str, ...]:
        """The names of the metrics that every evaluation measures, not only the one after the last step."""
        tests = (f"{split}/{name}" for split in self.test_sets for name in self.task.metrics(split))
        return (*tests, "train/loss")

    @cached_property
    def run_id(self) -> str:
        """16 hex digits of the SHA-256 of `identity`."""
        return _hash(self._identity_text({}), self.seed)

    @property
    def identity(self) -> dict[str, Any]:
        """The content that decides the run id, as literals: every field that is not at its default, and `versions`.

        A new field at its default changes no run id. A raised VERSION changes the id of every run that uses it.
        """
        identity: dict[str, Any] = json.loads(_with_seed(self._identity_text({}), self.seed))
        return identity

    def with_seeds(self, seeds: Sequence[int], texts: Mapping[str, str]) -> tuple[RunSpec, ...]:
        """Copies of this run with each of `seeds`, which were validated already.

        The parts are shared. `texts`: name of a part → its `part_text`, of those that are known.
        """
        text = self._identity_text(texts)
        parts, fields_set = (
            {name: getattr(self, name) for name in RunSpec.model_fields},
            self.model_fields_set | {"seed"},
        )
        copies = []
        for seed in seeds:
            # Not validated again: a plan may have thousands of copies that differ in their seed only.
            copy = RunSpec.model_construct(fields_set, **parts | {"seed": seed})
            copy.__dict__["run_id"] = _hash(text, seed)  # where `cached_property` keeps it
            copies.append(copy)
        return tuple(copies)

    def _identity_text(self, texts: Mapping[str, str]) -> tuple[str, str]:
        """`identity` as canonical JSON, before and after the seed. `texts`: see `with_seeds`."""
        before, after = "", ""
        for name in _SORTED_FIELDS:
            if name == "seed":
                before, after = after, ""
                continue
            if name == "evaluate" and self.evaluate.variants:
                # What their values mean depends on the encodings, which are another part.
                part = self.evaluate.model_copy(update={"variants": self._variants_as_read()})
                after += part_text(name, part)
                continue
            after += texts[name] if name in texts else part_text(name, getattr(self, name))
        # Without the last comma. Text, and no mapping that is dumped: a plan of many runs dumps each shared part once.
        return '{"spec":{' + before, f'{after[:-1]}}},"versions":{_canonical(self.versions)}}}'

    @property
    def versions(self) -> dict[str, int]:
        """The VERSION of each part of the run; of the task and the encodings, also as variants, their `version`.

        Task and encodings are always named; family, optimiser and schedule only where their VERSION is not 1, and
        dropout only where the model has it.
        """
        always = {self.task.qualified_kind(): self.task.version()}
        variants = map(self.variant, self.evaluate.variants)
        for encoding in chain(self.model.position, *variants):
            kind = encoding.qualified_kind()
            always[kind] = max(always.get(kind, 0), encoding.version(self.dims))
        dropout = {"model.dropout": DROPOUT_VERSION} if self.model.dropout else {}
        others = {"family": self.model.family, "optimizer": self.train.optimizer, "schedule": self.train.schedule}
        return (
            always
            | dropout
            | {f"{noun}.{part.qualified_kind()}": part.VERSION for noun, part in others.items() if part.VERSION != 1}
        )

    @property
    def plugins(self) -> dict[str, type[Kind]]:
        """Qualified kind → class, of the parts that are not built in and whose source is known."""
        parts = (self.task, *self.model.position, self.model.family, self.train.optimizer, self.train.schedule)
        return {part.qualified_kind(): type(part) for part in parts if part.source_digest() is not None}

    @property
    def plugin_sources(self) -> str | None:
        """`my_module.my_encoding 0123456789ab`, joined by commas; None without plugins."""
        return ", ".join(f"{kind} {cls.source_digest()}" for kind, cls in sorted(self.plugins.items())) or None


SECTIONS: dict[str, type[BaseModel]] = {"model": ModelSpec, "train": TrainSpec, "evaluate": EvaluateSpec}


def default_of_field(key: str, spec: Mapping[str, Any]) -> Any:
    """The default of a field that a stored spec lacks, because it is older than the field.

    Args:
        key: The dotted key of the field.
        spec: The values of the spec by dotted key.

    Returns:
        None where the field is null, has fields of its own, or belongs to a part that the spec does not have.
    """
    if any(is_below(each, key) for each in spec):  # `gate_bias: {span: 16}` is no number
        return None
    above, _, name = key.partition(".")
    part: type[BaseModel] | None = SECTIONS.get(above)
    if is_field(key):
        above, _, name = key.rpartition(".")
        kind = above.removeprefix(f"{ENCODINGS_KEY}.")
        part = ENCODINGS.get(kind) if kind in str(spec.get(ENCODINGS_KEY, "")).split("+") else None
    elif above == "task":
        part = TASKS.get(str(spec.get("task.kind")))
    if part is None or name not in part.model_fields:
        return None
    fields = {each.removeprefix(f"{above}."): value for each, value in spec.items() if is_below(each, above)}
    default = part.default_before(name, fields) if issubclass(part, Kind) else part.model_fields[name].default
    if not isinstance(default, (bool, int, float, str)):
        return None
    return int(default) if isinstance(default, float) and default.is_integer() else default


_SORTED_FIELDS = sorted(RunSpec.model_fields)
"""`task` is among them, is required, and follows `seed`."""


def part_text(name: str, part: Any) -> str:
    """What a part of a run adds to the canonical JSON of its identity; empty where it is at its default."""
    field = RunSpec.model_fields[name]
    at_default = not field.is_required() and part == field.default
    return "" if at_default else f'"{name}":{_canonical(_non_defaults(part))},'


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
"""JSON in one form only, so that equal identities have equal hashes."""


def _with_seed(text: tuple[str, str], seed: int) -> str:
    """The JSON of an identity. A seed at its default is left out, as all fields are."""
    return text[0] + (f'"seed":{seed},' if seed != RunSpec.model_fields["seed"].default else "") + text[1]


def _hash(text: tuple[str, str], seed: int) -> str:
    return hashlib.sha256(_with_seed(text, seed).encode()).hexdigest()[:16]


def _non_defaults(value: Any) -> Any:
    """`value` as JSON literals without the fields that are at their default; `kind` is kept.

    A BARE spec without options becomes its qualified kind, so that a plugin's is not confused with another of its name.
    """
    if isinstance(value, BaseModel):
        fields, excluded = type(value).model_fields, getattr(value, "NON_IDENTITY_FIELDS", ())
        data = {
            name: _non_defaults(item)
            for name, item in value
            # Iterating over a model also yields its cached properties.
            if name in fields
            and name not in excluded
            and (name == "kind" or fields[name].is_required() or item != fields[name].default)
        }
        if isinstance(value, Kind) and value.BARE:
            data["kind"] = value.qualified_kind()
            return data if len(data) > 1 else data["kind"]
        return data
    if isinstance(value, (tuple, list)):
        return [_non_defaults(item) for item in value]
    if isinstance(value, dict):
        return {name: _non_defaults(item) for name, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a run's identity consists of literals; {value!r} is a {type(value).__name__}")
