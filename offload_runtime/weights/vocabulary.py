"""What the token ids of a model mean.

Vocabularies are read from the files themselves: transformers takes seconds, and of a draft nothing else is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_runtime.fields import Fields

# Of a GGUF file's types of tokens those that stand for text: normal ones, single bytes, and where nothing is said.
_GGUF_ORDINARY = (0, 1, 6)
# Names that fill up a vocabulary where nothing says that they do: [PAD151935], <unused7>, <|reserved_token_3|>.
_FILLER = re.compile(r"(?i)[\[<]\|?_?(?:pad|unused|reserved|extra|dummy|placeholder|control|blank)[\w ]*\|?[\]>]")


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
