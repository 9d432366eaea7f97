"""What a checkpoint is to everything above: an opened and validated source of tensors; and what its readers share.

A source checks everything that can be checked cheaply when it is opened (files, headers, shapes), so that a broken
checkpoint is refused before gigabytes are read and memory is reserved.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from offload_runtime_kernels.scaled_rows import ScaledFormat
from typing_extensions import Self

from offload_runtime.errors import CheckpointError, OptionError, VocabularyMismatchError
from offload_runtime.fields import Fields, shortened, shown
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.heads import HeadConfig
from offload_runtime.models.reading import end_ids
from offload_runtime.models.registry import FAMILIES
from offload_runtime.params import SamplingParams
from offload_runtime.weights.encoding import Fill
from offload_runtime.weights.header import StoredTensor
from offload_runtime.weights.layout import ModelLayout, checkpoint_tensors
from offload_runtime.weights.tokenizer import Vocabulary, tokenizer_vocabulary

# Buffers that old versions of transformers saved although they follow from the config, and the head where it is tied;
# of GGUF files what scales the rotations, which is a part of the configuration.
_LEFTOVERS = (
    ".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", "lm_head.weight",
    "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight",
)  # fmt: skip
# Of a tensor that a fingerprint looks at, three times.
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class DescribedModel:
    """A model that is known by its configuration: what a plan has to know of it. `native_dtype` is what `--dtype auto`
    means: the stored dtype, bf16 when the file is quantised. `kinds` says by transformers' name how tensors are stored
    that can be kept as they are, in the words of `weights.encoding` or as a format of it, and
    `decoded` that they are not; `uncoded` are matrices that are known not to fit a code.
    `read_vocabulary` reads what files say of its tokens, which may be nothing, and `read_mtp` the head that its files
    carry, if any. `hit_exponent` is of what is expected in a pool of experts (`weights.expert_hits`), None of a model
    that no files are of."""

    model_config: ModelConfig
    native_dtype: torch.dtype
    kinds: Mapping[str, str | ScaledFormat] = field(default_factory=dict, kw_only=True)
    decoded: bool = field(default=False, kw_only=True)
    uncoded: frozenset[str] = field(default=frozenset(), kw_only=True)
    read_vocabulary: Callable[[], Vocabulary | None] = field(default=lambda: None, kw_only=True)
    read_mtp: Callable[[], DescribedModel | None] = field(default=lambda: None, kw_only=True)
    hit_exponent: float | None = field(default=None, kw_only=True)

    def config(self) -> ModelConfig:
        """Return the shape and flags of the model."""
        return self.model_config

    @property
    def family(self) -> str:
        """Return what people call its family; not of a head."""
        known = FAMILIES.values()
        return next(one.title for one in known if one.architecture == self.model_config.architecture)

    def vocabulary(self) -> Vocabulary | None:
        """Return what its token ids mean; None where nothing says so."""
        return self.read_vocabulary()

    def fitted(self, target: DescribedModel) -> Self:
        """Return the same draft as it is beside a target, which a head has to be made for.

        Raises:
            CheckpointError, VocabularyMismatchError: As of `HeadConfig.fitted`.
        """
        if not isinstance(self.model_config, HeadConfig):
            return self
        return replace(self, model_config=self.model_config.fitted(target.model_config.complete))

    def layout(self, dtype: torch.dtype, *, coded: bool = False) -> ModelLayout:
        """Return how its weights lie in memory where it computes in `dtype`; with `coded`, those in bf16 in 12 bits."""
        if (dtype, coded) not in self._layouts:
            kinds = {} if self.decoded else self.kinds
            made = ModelLayout.of(self.model_config, dtype, kinds, coded=coded, uncoded=self.uncoded)
            self._layouts[dtype, coded] = made
        return self._layouts[dtype, coded]

    @cached_property
    def as_decoded(self) -> DescribedModel:
        """Return the same model as if its files were of the element type that it computes in."""
        return replace(self, decoded=True) if self.kinds else self

    @cached_property
    def _layouts(self) -> dict[tuple[torch.dtype, bool], ModelLayout]:
        """Return those that were asked for: every way to place a model asks again."""
        return {}


@dataclass(frozen=True)
class CheckpointSource(DescribedModel):
    """An opened and validated checkpoint.

    Attributes:
        reference: What the user named, for messages.
        settings: What `config.json` says, or would.
        fills: What reads each tensor of `checkpoint_tensors(config())`, in the order of the files.
        tokenizer: Reads transformers' tokenizer with its chat template. Raises `CheckpointError` where there is none.
        generation: The content of `generation_config.json`, or what a GGUF file says in its place; None where there is
            nothing.
        generation_name: What it is called, for messages.
        stored: All tensors of its files; none where the weights are made.
    """

    reference: str
    settings: Mapping[str, Any]
    fills: Mapping[str, Fill]
    tokenizer: Callable[[], Any]
    generation: dict[str, Any] | None = None
    generation_name: str = field(default="generation_config.json", kw_only=True)
    stored: tuple[StoredTensor, ...] = field(default=(), kw_only=True)

    def vocabulary(self) -> Vocabulary:
        """Return what its token ids mean. Raises `CheckpointError` where there is no tokenizer."""
        return self.read_vocabulary() or tokenizer_vocabulary(self.tokenizer())

    @property
    def generation_fields(self) -> Fields:
        """Return the generation settings; without any where there is no such file."""
        return Fields(f"{self.generation_name} of {self.reference}", self.generation or {})

    def generation_eos(self, tokenizer: Any = None) -> tuple[int, ...]:
        """Return the token ids that end an answer: the generation settings' or else the model configuration's, and the
        end token of a tokenizer, which makers of chat models change alone."""
        ids = end_ids(self.generation_fields) or self.model_config.eos_token_ids
        own = getattr(tokenizer, "eos_token_id", None)
        if not isinstance(own, int) or own in ids or not 0 <= own < self.model_config.vocab_size:
            return ids
        return (*ids, own)

    @cached_property
    def fingerprint(self) -> str:
        """Tells this model from every other one, wherever its files lie: a hash of the configuration and, of each
        tensor, of its name, how it is stored, and three pieces of its content. Reads no more than that: all of a large
        model would take as long as loading it. Weights that are made go by what they are called.

        Raises:
            CheckpointError: A file cannot be read any more.
        """
        found = hashlib.blake2b(json.dumps(self.settings, sort_keys=True, default=str).encode(), digest_size=16)
        if not self.stored:
            found.update(self.reference.encode())
        for tensor in sorted(self.stored, key=attrgetter("name")):
            found.update(repr((tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)).encode())
            size = min(tensor.nbytes, _SAMPLE_BYTES)
            for skip in (0, (tensor.nbytes - size) // 2, tensor.nbytes - size):
                piece = bytearray(size)
                tensor.read_into(memoryview(piece), skip)
                found.update(piece)
        return found.hexdigest()


def sampling_defaults(generation: Fields) -> dict[str, float]:
    """Return how a model's makers want tokens to be sampled: the fields of `SamplingParams` that a
    `generation_config.json` names, greedy where it switches sampling off. What it does not name it leaves open:
    transformers' own defaults are nobody's wish. A value that makes no sense is left out, with a warning."""
    named: dict[str, float] = {}
    readers: dict[str, Callable[[], float]] = {
        **{name: partial(generation.number, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
        "top_k": partial(generation.integer, "top_k", at_least=0),
        "do_sample": lambda: named.get("temperature", 1.0) if generation.flag("do_sample") else 0.0,
    }
    for name, read in readers.items():
        field_name = "temperature" if name == "do_sample" else name
        try:
            if name in generation:
                SamplingParams(**{field_name: (value := read())})  # type: ignore[arg-type]
                named[field_name] = value
        except (CheckpointError, OptionError) as error:
            where = "" if isinstance(error, CheckpointError) else f"{generation.where}: "
            logging.getLogger(__name__).warning("%s%s; it is ignored", where, error)
    return named


# --- what of two models means the same

# Of the ordinary tokens that both have, one in so many may differ: what a conversion has spelled in its own way. Those
# are never proposed.
_ONE_ODD_IN = 1000
# Vocabularies of one family are padded to other sizes.
MOST_PADDING = 1024
# Of the ordinary tokens of the larger vocabulary, both have to have this share: of fewer little could be proposed.
_LEAST_SHARED = 0.5


@dataclass(frozen=True)
class SharedVocabulary:
    """Says what a draft may propose: ids below `size`, but for the `excluded` ones."""

    size: int
    excluded: tuple[int, ...] = ()


def share_vocabulary(target: DescribedModel, draft: DescribedModel) -> SharedVocabulary | None:
    """Return what a draft may propose to a target: a proposal changes no token, so control tokens, added ones and those
    that fill up a vocabulary may be others, or other many.

    Returns:
        None where one of the two has no vocabulary to compare, which a description may lack, and they are as large. Of
        a head beside its target everything: it has no tokenizer, and `HeadConfig.fitted` has compared the sizes.

    Raises:
        CheckpointError: A checkpoint's tokenizer cannot be read.
        VocabularyMismatchError: Ids of ordinary tokens mean other text.
    """
    if isinstance(draft.config(), HeadConfig):
        return SharedVocabulary(target.config().vocab_size)
    of_target, of_draft = target.vocabulary(), draft.vocabulary()
    logits = {"draft": draft.config().vocab_size, "target": target.config().vocab_size}
    if of_target is None or of_draft is None or not (of_target.tokens and of_draft.tokens):
        if abs(logits["draft"] - logits["target"]) > MOST_PADDING:
            raise VocabularyMismatchError(
                f"the draft has {logits['draft']} logits and the target {logits['target']}, which are not of one "
                "vocabulary: take a draft of the same family, or --draft ngram"
            )
        return None
    of_target, of_draft = of_target.below(logits["target"]), of_draft.below(logits["draft"])
    theirs, ours = of_draft.tokens, of_target.tokens
    common = of_target.ordinary & of_draft.ordinary
    agreeing = sum(ours[index] == theirs[index] for index in common)
    most = max(len(of_target.ordinary), len(of_draft.ordinary))
    if (len(common) - agreeing) * _ONE_ODD_IN > len(common) or agreeing < max(1, most * _LEAST_SHARED):
        raise VocabularyMismatchError(
            f"the draft's vocabulary ({len(theirs)} tokens, {logits['draft']} logits) is not the target's "
            f"({len(ours)} tokens, {logits['target']} logits): {_difference(of_target, of_draft)}. "
            "Take a draft of the same family, or --draft ngram"
        )
    shared = {index for index, token in theirs.items() if ours.get(index) == token}
    size = max(shared) + 1
    return SharedVocabulary(size, tuple(index for index in range(size) if index not in shared))


def _difference(target: Vocabulary, draft: Vocabulary) -> str:
    """Return how many entries differ among those that are ordinary in one of the two, and the first of them."""
    ours, theirs = target.tokens, draft.tokens
    different = [index for index in target.ordinary | draft.ordinary if ours.get(index) != theirs.get(index)]
    first = min(different)
    of_target, of_draft = (shown(one[first]) if first in one else "nothing" for one in (ours, theirs))
    return f"{len(different)} entries differ (id {first} is {of_target} in the target and {of_draft} in the draft)"


# --- what the readers of both formats share


def match_tensors(
    where: object, stored: Mapping[str, StoredTensor], config: ModelConfig,
    check_dtype: Callable[[StoredTensor], None], stored_name: Callable[[str], str] = str, *, whole: bool,
) -> dict[str, StoredTensor]:  # fmt: skip
    """Find the needed tensors, check their shapes and dtypes, and warn of others than known leftovers.

    Args:
        where: File or directory, for messages.
        stored: All tensors that are there, by their names in the file.
        config: Says which are needed.
        check_dtype: Refuses one that is stored in a way that is not read; asked about one of each way.
        stored_name: From transformers' name to the file's.
        whole: Whether all have to be there; without it nothing is warned of.

    Returns:
        By transformers' name, in the order of `stored`.

    Raises:
        CheckpointError: Some are missing, of another shape, or refused.
    """
    destinations = checkpoint_tensors(config)
    needed = {stored_name(name): name for name in destinations}
    missing = [name for name in needed if name not in stored and whole]
    if missing == ["lm_head.weight"] and not isinstance(config, HeadConfig):
        raise CheckpointError(
            f"{where} has no lm_head.weight and its head is not tied: it was saved without its head, as a base model, "
            "and cannot generate; take the checkpoint of the causal model, or set tie_word_embeddings if it is tied"
        )
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} of {len(needed)} tensors ({shortened(missing)}): "
            "it is incomplete or belongs to another configuration, download it again"
        )
    found = {needed[name]: tensor for name, tensor in stored.items() if name in needed}
    for name, tensor in found.items():
        if tensor.shape != (expected := destinations[name].shape):
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} has shape {list(tensor.shape)}, expected {list(expected)}: "
                "the weights belong to another configuration, download or convert them again"
            )
    surplus = [name for name in stored if name not in needed and not name.endswith(_LEFTOVERS)]
    if (
        surplus and whole
    ):  # transformers and llama.cpp leave such tensors out too, so the tokens still are the same as theirs
        message = "%s holds %d tensors this model does not use (%s)"
        logging.getLogger(__name__).warning(message, where, len(surplus), shortened(surplus))
    for tensor in {tensor.dtype: tensor for tensor in found.values()}.values():
        check_dtype(tensor)
    return found
