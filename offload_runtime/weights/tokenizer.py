"""Tokenizers, and what the token ids of a model mean: transformers' of a checkpoint directory, or from what a GGUF file
says.

A GGUF file has a vocabulary and the *name* of how text is cut before merging, `tokenizer.ggml.pre`. What the names mean
is known to llama.cpp (`llama-vocab.cpp`), whose token ids these are. transformers takes 4 to 10 s for such a file, and
cuts as GPT-2 where it does not know the name; this takes 0.3 s for 49,000 tokens and refuses the name. Vocabularies are
read from the files themselves, too: of a draft nothing else is needed.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import MOST, Fields, shown
from offload_runtime.weights.header import refuse_other_file

# Of a GGUF file's types of tokens those that stand for text: normal ones, single bytes, and where nothing is said.
_GGUF_ORDINARY = (0, 1, 6)
# Names that fill up a vocabulary where nothing says that they do: [PAD151935], <unused7>, <|reserved_token_3|>.
_FILLER = re.compile(r"(?i)[\[<]\|?_?(?:pad|unused|reserved|extra|dummy|placeholder|control|blank)[\w ]*\|?[\]>]")


@dataclass(frozen=True)
class Vocabulary:
    """Holds tokens by id. `ordinary` are the ids of those that stand for pieces of text: not of control tokens, of
    others that were added to a tokenizer, and of names that fill it up."""

    tokens: Mapping[int, str]
    ordinary: frozenset[int]

    @classmethod
    def of(cls, tokens: Iterable[tuple[int, str]], special: Mapping[int, str]) -> Vocabulary:
        """Make that of all `tokens` of a model, and those of them, or besides them, that are `special`."""
        found = {**dict(tokens), **special}
        texts = frozenset(one for one, token in found.items() if one not in special and not _FILLER.fullmatch(token))
        return cls(found, texts)

    def below(self, size: int) -> Vocabulary:
        """Return those that a model of so many logits can say: a tokenizer may know more."""
        tokens = {index: token for index, token in self.tokens.items() if index < size}
        return Vocabulary(tokens, self.ordinary & tokens.keys())


def gguf_vocabulary(fields: Fields) -> Vocabulary | None:
    """Return that of a GGUF file's metadata; None where it has none."""
    tokens = list(enumerate(fields.items("tokenizer.ggml.tokens", str)))
    types = fields.items("tokenizer.ggml.token_type", int)
    special = {index: token for (index, token), kind in zip(tokens, types, strict=False) if kind not in _GGUF_ORDINARY}
    return Vocabulary.of(tokens, special) if tokens else None


def directory_vocabulary(directory: Path) -> Vocabulary | None:
    """Return that of the `tokenizer.json` in a directory; None where there is none that has a vocabulary."""
    try:
        described = json.loads((directory / "tokenizer.json").read_bytes())
        model, added = described["model"]["vocab"], described.get("added_tokens") or ()
        pairs = enumerate(piece for piece, _ in model) if isinstance(model, list) else _swapped(model)
        return Vocabulary.of(pairs, {int(one["id"]): str(one["content"]) for one in added})
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def tokenizer_vocabulary(tokenizer: Any) -> Vocabulary:
    """Return that of one of transformers' tokenizers."""
    return Vocabulary.of(_swapped(tokenizer.get_vocab()), dict(_swapped(tokenizer.get_added_vocab())))


def _swapped(ids: Mapping[str, int]) -> Iterable[tuple[int, str]]:
    return ((index, token) for token, index in ids.items())


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VOCABULARIES = tomllib.loads(Path(__file__).with_name("vocabularies.toml").read_text(encoding="utf-8"))
_END_NAMES = set(_VOCABULARIES["end_tokens"])
# How text is cut, by the names that files have for it.
_SPLITS: dict[str, dict[str, list[str]]] = _VOCABULARIES["pre"]
_BY_NAME = {name: table for first, table in _SPLITS.items() for name in (first, *table.get("aliases", ()))}
_IGNORING_MERGES = {name for table in _SPLITS.values() for name in table.get("ignore_merges", ())}
_ENDING_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SENTENCEPIECE = ("llama", "gemma4")  # kinds of tokenizers that merge whole texts, or lines
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file does not say
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
_NAMES_IN_TRANSFORMERS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# How bytes are spelled that UTF-8 never has: DeepSeek's files have some of these letters as tokens, which mean letters.
_NO_BYTES = tuple("ÀÁõö÷øùúûüýþÿ")
_MOST_CHARACTERS = 1 << 10  # of a token: far more than any has


def special_ids(fields: Fields) -> dict[str, int]:
    """Return the ids of special tokens, such as `bos`, that a GGUF file names and its vocabulary has."""
    defaults = _SENTENCEPIECE_IDS if fields.text("tokenizer.ggml.model", "") == "llama" else {}
    num_tokens, ids = len(fields.items("tokenizer.ggml.tokens", str)), dict[str, int]()
    for name in (*_ENDING_IDS, *_NAMES_IN_TRANSFORMERS):
        key, default = f"tokenizer.ggml.{name}_token_id", defaults.get(name, -1)
        ids[name] = fields.integer(key, default, at_least=-MOST, at_most=1 << 64)
    return {name: index for name, index in ids.items() if 0 <= index < num_tokens}


def end_token_ids(fields: Fields) -> list[int]:
    """Return what ends an answer: the tokens that the file names, the end of a sequence first, and those of known
    names."""
    tokens = fields.items("tokenizer.ggml.tokens", str)
    known = _end_names(tokens)
    named = [index for name, index in special_ids(fields).items() if name in _ENDING_IDS]
    named = [index for index in named if tokens[index] not in _END_NAMES - known]
    return list(dict.fromkeys(named + [index for index, token in enumerate(tokens) if token in known]))


def _end_names(tokens: list[str]) -> set[str]:
    """Return the known names of what ends an answer. Gemma has `</s>` too, which is a tag of HTML there, and of several
    messages in an answer `<|end|>` ends each."""
    found = _END_NAMES.intersection(tokens)
    others = {"</s>"} if "<eos>" in found else {"<|end|>"} if found & {"<|return|>", "<|calls|>"} else set()
    return found - others


# --- tokenizers


def _working(make: Callable[[], Any], where: object, remedy: str) -> Any:
    """Return a tokenizer that reads and writes a text; `CheckpointError` for whatever happens instead."""
    try:
        tokenizer = make()
        tokenizer.decode(tokenizer.encode("a b\u00e9\u65e5 12\n"), skip_special_tokens=True)
        return tokenizer
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:  # errors of several libraries, and panics, which are no `Exception`
        raise CheckpointError(f"{where} has no usable tokenizer ({shown(error)}): {remedy}") from error


def load_tokenizer(directory: Path) -> Any:
    """Return transformers' tokenizer of a checkpoint directory.

    Raises:
        CheckpointError: There is none or it cannot be read.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    def make() -> Any:
        # Old files ask for cleaning up: it drops spaces before punctuation, and of byte-level vocabularies only warns.
        try:
            return AutoTokenizer.from_pretrained(directory, clean_up_tokenization_spaces=False)
        except StrictDataclassError as error:
            why = f"transformers does not read ({shown(error.__cause__ or error)})"
            raise CheckpointError(f"{directory} has a config.json that {why}: fix it, or download it again") from error

    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"):
        if (directory / name).is_file():
            refuse_other_file(directory / name)
    tokenizer = _working(make, directory, "add its tokenizer.json and tokenizer_config.json")
    template = directory / "chat_template.json"  # where models that read images had theirs, which is another class's
    if tokenizer.chat_template is None and template.exists():
        with suppress(ValueError, AttributeError, RecursionError):
            tokenizer.chat_template = json.loads(template.read_bytes()).get("chat_template")
    return tokenizer


def gguf_tokenizer(fields: Fields, directory: Path) -> Any:
    """Return the tokenizer that a GGUF file's metadata describes, as transformers' `PreTrainedTokenizerFast`; where it
    is of a kind that is not read, the one in the file's directory, with a warning.

    Raises:
        CheckpointError: It is damaged; or neither byte-level BPE that cuts text in a known way nor SentencePiece, and
            there is no `tokenizer.json` of the same vocabulary instead.
    """
    # SentencePiece does not cut. Of a file that does not say how, llama.cpp warns that its own guess degrades the text.
    model, pre = (fields.text(f"tokenizer.ggml.{name}", "(missing)") for name in ("model", "pre"))
    if model in _SENTENCEPIECE or (model == "gpt2" and pre in _BY_NAME):
        return _working(partial(_make, fields, model, pre), fields.where, "download or convert it again")
    found = f"{fields.where} has a tokenizer of a kind that is not read (model {shown(model)}, pre {shown(pre)})"
    if not (directory / "tokenizer.json").exists():
        raise CheckpointError(
            f"{found}, which should be llama, or gpt2 with pre {', '.join(_SPLITS)} or an alias: put the model's "
            "tokenizer.json and tokenizer_config.json beside the file, or take one that was converted lately"
        )
    tokenizer, tokens = load_tokenizer(directory), fields.items("tokenizer.ggml.tokens", str)
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()  # the latter may be spelled otherwise there
    if tokens and any(tokens[i : i + 1] != [token] for token, i in vocabulary.items() if token not in added):
        sizes = f"{len(tokens)} tokens, and the tokenizer.json beside it is of another vocabulary, of {len(vocabulary)}"
        raise CheckpointError(f"{found} and {sizes}: put that of the same model there")
    logging.getLogger(__name__).warning("%s: the tokenizer.json beside it is used", found)
    return tokenizer


def _make(fields: Fields, model: str, pre: str) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields.items("tokenizer.ggml.tokens", str))]
    types = fields.items("tokenizer.ggml.token_type", int) or [0] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not len(vocabulary) == len(tokens) == len(types) or max(map(len, ["", *tokens])) > _MOST_CHARACTERS:
        needed = f"each once, of up to {_MOST_CHARACTERS} characters, with a type"
        fields.refuse("tokenizer.ggml.tokens", tokens, needed)
    typed, ends = list(zip(tokens, types, strict=True)), _end_names(tokens)
    control = [token for token, of in typed if of in (_UNKNOWN, _CONTROL) or token in ends]
    others = [token for token, of in typed if of == _USER_DEFINED and token not in ends]
    sentencepiece, ids = model in _SENTENCEPIECE, special_ids(fields)
    if sentencepiece:
        tokenizer = _sentencepiece(fields, vocabulary, tokens[ids.get("unknown", 0)])
    else:
        tokenizer = _byte_level(fields, vocabulary, pre, others)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in others])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=_chat_templates(fields),
        add_bos_token=fields.flag("tokenizer.ggml.add_bos_token", sentencepiece or pre in _IGNORING_MERGES),
        add_eos_token=fields.flag("tokenizer.ggml.add_eos_token"), clean_up_tokenization_spaces=False,
        **{f"{word}_token": tokens[ids[name]] for name, word in _NAMES_IN_TRANSFORMERS.items() if name in ids},
    )  # fmt: skip


def _chat_templates(fields: Fields) -> dict[str, str] | str | None:
    """Return the chat template; of several, such as `tool_use`, all by their names, of which transformers chooses."""
    key = "tokenizer.chat_template"
    names = [name.removeprefix(f"{key}.") for name in fields.values if name.startswith(f"{key}.")]
    found = {"default": fields.text(key, ""), **{name: fields.text(f"{key}.{name}", "") for name in names}}
    found = {name: template for name, template in found.items() if template}
    return found if len(found) > 1 else next(iter(found.values()), None)


def _byte_level(fields: Fields, vocabulary: dict[str, int], pre: str, others: list[str]) -> Any:
    """Byte-level BPE: text is cut, and what is in a piece merged in the order of the merges; `others` are tokens as
    they are written, not by their bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges: list[Any] = [tuple(pair.split(" ", 1)) for pair in fields.items("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _IGNORING_MERGES))
    by_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _BY_NAME[pre]["splits"]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    letters = [decoders.Replace(word, by_bytes.pre_tokenize_str(word)[0][0]) for word in others if word in _NO_BYTES]
    tokenizer.decoder = decoders.Sequence([*letters, decoders.ByteLevel()])
    return tokenizer


def _sentencepiece(fields: Fields, vocabulary: dict[str, int], unknown: str) -> Any:
    """SentencePiece: the whole text is merged, the pieces of the best scores first; what has no piece is bytes. Gemma 4
    says in which order, and merges nothing over the ends of lines."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    by_lines = fields.text("tokenizer.ggml.model") == "gemma4"
    if by_lines:
        merges: list[Any] = [tuple(pair.split(" ", 1)) for pair in fields.items("tokenizer.ggml.merges", str)]
    else:
        scores = dict(zip(vocabulary, fields.items("tokenizer.ggml.scores", float), strict=True))
        merges = [
            (token[:place], token[place:]) for token in sorted(scores, key=lambda token: -scores[token])
            for place in range(1, len(token)) if token[:place] in vocabulary and token[place:] in vocabulary
        ]  # fmt: skip
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    first = fields.flag("tokenizer.ggml.add_space_prefix", True)
    blanks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if first else blanks
    if by_lines:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts if first else parts[:-1])
    return tokenizer
