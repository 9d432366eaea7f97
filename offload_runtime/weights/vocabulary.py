"""What the token ids of a model mean, and which of them mean the same in its draft.

Vocabularies are read from the files themselves: transformers takes seconds, and of a draft nothing else is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offload_runtime.errors import VocabularyMismatchError
from offload_runtime.fields import Fields, shown

if TYPE_CHECKING:
    from offload_runtime.models.config import ModelConfig

# Of a GGUF file's types of tokens those that stand for text: normal ones, single bytes, and where nothing is said.
_GGUF_ORDINARY = (0, 1, 6)
# Names that fill up a vocabulary where nothing says that they do: [PAD151935], <unused7>, <|reserved_token_3|>.
_FILLER = re.compile(r"(?i)[\[<]\|?_?(?:pad|unused|reserved|extra|dummy|placeholder|control|blank)[\w ]*\|?[\]>]")
# Of the ordinary tokens that both have, one in so many may differ: what a conversion has spelled in its own way. Those
# are never proposed.
_ONE_ODD_IN = 1000
# Vocabularies of one family are padded to other sizes.
MOST_PADDING = 1024
# Of the ordinary tokens of the larger vocabulary, both have to have this share: of fewer little could be proposed.
_LEAST_SHARED = 0.5


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id: `ordinary` ones stand for pieces of text; `special` ones are control tokens, others that were added
    to a tokenizer, and names that fill it up."""

    ordinary: Mapping[int, str]
    special: Mapping[int, str]

    @classmethod
    def of(cls, tokens: Iterable[tuple[int, str]], special: Mapping[int, str]) -> Vocabulary:
        """All `tokens` of a model, and those of them, or besides them, that are `special`."""
        ordinary, others = dict[int, str](), dict(special)
        for index, token in tokens:
            if index not in others:
                (others if _FILLER.fullmatch(token) else ordinary)[index] = token
        return cls(ordinary, others)

    @property
    def tokens(self) -> dict[int, str]:
        """All of them."""
        return {**self.special, **self.ordinary}

    def below(self, size: int) -> Vocabulary:
        """Those that a model of so many logits can say: a tokenizer may know more."""
        ordinary, special = (
            {index: token for index, token in tokens.items() if index < size}
            for tokens in (self.ordinary, self.special)
        )
        return Vocabulary(ordinary, special)


class HasVocabulary(Protocol):
    """What is compared of a model, opened or described."""

    def config(self) -> ModelConfig:
        """Its shape."""

    def vocabulary(self) -> Vocabulary | None:
        """What its token ids mean; None where nothing says so."""


@dataclass(frozen=True)
class SharedVocabulary:
    """What a draft may propose: ids below `size`, but for the `excluded` ones."""

    size: int
    excluded: tuple[int, ...] = ()


def gguf_vocabulary(fields: Fields) -> Vocabulary | None:
    """That of a GGUF file's metadata; None where it has none."""
    tokens = list(enumerate(fields.items("tokenizer.ggml.tokens", str)))
    types = fields.items("tokenizer.ggml.token_type", int)
    special = {index: token for (index, token), kind in zip(tokens, types, strict=False) if kind not in _GGUF_ORDINARY}
    return Vocabulary.of(tokens, special) if tokens else None


def directory_vocabulary(directory: Path) -> Vocabulary | None:
    """That of the `tokenizer.json` in a directory; None where there is none that has a vocabulary."""
    try:
        described = json.loads((directory / "tokenizer.json").read_bytes())
        model, added = described["model"]["vocab"], described.get("added_tokens") or ()
        pairs = enumerate(piece for piece, _ in model) if isinstance(model, list) else _swapped(model)
        return Vocabulary.of(pairs, {int(one["id"]): str(one["content"]) for one in added})
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def tokenizer_vocabulary(tokenizer: Any) -> Vocabulary:
    """That of one of transformers' tokenizers."""
    return Vocabulary.of(_swapped(tokenizer.get_vocab()), dict(_swapped(tokenizer.get_added_vocab())))


def _swapped(ids: Mapping[str, int]) -> Iterable[tuple[int, str]]:
    return ((index, token) for token, index in ids.items())


def share_vocabulary(target: HasVocabulary, draft: HasVocabulary) -> SharedVocabulary | None:
    """What a draft may propose to a target: a proposal changes no token, so control tokens, added ones and those that
    fill up a vocabulary may be others, or other many.

    Returns:
        None where one of the two has no vocabulary to compare, which a description may lack, and they are as large.

    Raises:
        CheckpointError: A checkpoint's tokenizer cannot be read.
        VocabularyMismatchError: Ids of ordinary tokens mean other text.
    """
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
    common = of_target.ordinary.keys() & of_draft.ordinary.keys()
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
    """How many entries differ among those that are ordinary in one of the two, and the first of them."""
    ours, theirs = target.tokens, draft.tokens
    ids = target.ordinary.keys() | draft.ordinary.keys()
    different = [index for index in ids if ours.get(index) != theirs.get(index)]
    first = min(different)
    of_target, of_draft = (shown(one[first]) if first in one else "nothing" for one in (ours, theirs))
    return f"{len(different)} entries differ (id {first} is {of_target} in the target and {of_draft} in the draft)"
