"""Tokenizers: transformers' of a checkpoint directory, or built from the metadata of a GGUF file.

A GGUF file has a vocabulary and the *name* of how text is cut before merging, `tokenizer.ggml.pre`. What the names mean
is known to llama.cpp (`llama-vocab.cpp`), whose token ids these are. transformers takes 4 to 10 s for such a file, and
cuts as GPT-2 where it does not know the name; this takes 0.3 s for 49,000 tokens and refuses the name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from offload_runtime.errors import CheckpointError
from offload_runtime.weights.fields import MOST, Fields, shown

# --- how text is cut: each expression in turn cuts what the ones before have left

_APOSTROPHES = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_FULL_WIDTH = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+"
# Cased letters, as of Unicode 11.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ"
    "-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)


# llama.cpp's letters: those outside ASCII count as capital and as small, and marks as neither.
_FIRST, _CAPITAL, _SMALL = r"[^\r\n\p{L}\p{N}]?", r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_WORD = rf"{_APOSTROPHES}|{_FIRST}\p{{L}}+"
_CASED_WORD = f"{_FIRST}{_CAPITAL}*{_SMALL}+|{_FIRST}{_CAPITAL}+{_SMALL}*"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (rf"{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_BLANKS}",),
    "qwen2": (rf"{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_BLANKS}",),
    "tekken": (rf"{_CASED_WORD}|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_BLANKS}",),
    "seed-coder": (rf"{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",),
    "deepseek-llm": (r"[\r\n]", rf"\s?[{_CASED}]+", _FULL_WIDTH, r"\s+$", _CJK, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
    ),
}  # fmt: skip
# What begins with `bos` unless it says otherwise, and takes a word that is in the vocabulary as it is.
_WHOLE_WORDS = "tekken llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2".split()  # noqa: SIM905
_ALIASES = {
    "gpt-2": "phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion exaone4 granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 smaug-bpe dbrx chatglm-bpe",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
}
_SPLITS_BY_NAME = {alias: _SPLITS[name] for name, all_of in _ALIASES.items() for alias in all_of.split()} | _SPLITS


# --- special tokens, by llama.cpp's names: these end an answer, and are control tokens, whatever type a file gives them

_END_WORDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <\uff5cend▁of▁sentence\uff5c> [e~[ "
    # of filling in the middle: padding, the next repository, the next file
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|>"
)
_END_NAMES = set(_END_WORDS.split())
_ENDING_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file does not say
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
_NAMES_IN_TRANSFORMERS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# How bytes are spelled that UTF-8 never has: DeepSeek's files have some of these letters as tokens, which mean letters.
_NO_BYTES = tuple("ÀÁõö÷øùúûüýþÿ")
_MOST_CHARACTERS = 1 << 10  # of a token: far more than any has


def special_ids(fields: Fields) -> dict[str, int]:
    """The ids of special tokens, such as `bos`, that a GGUF file names and its vocabulary has."""
    defaults = _SENTENCEPIECE_IDS if fields.text("tokenizer.ggml.model", "") == "llama" else {}
    num_tokens, ids = len(fields.items("tokenizer.ggml.tokens", str)), dict[str, int]()
    for name in (*_ENDING_IDS, *_NAMES_IN_TRANSFORMERS):
        key, default = f"tokenizer.ggml.{name}_token_id", defaults.get(name, -1)
        ids[name] = fields.integer(key, default, at_least=-MOST, at_most=1 << 64)
    return {name: index for name, index in ids.items() if 0 <= index < num_tokens}


def end_token_ids(fields: Fields) -> list[int]:
    """What ends an answer: the tokens that the file names, the end of a sequence first, and those of known names."""
    named = [index for name, index in special_ids(fields).items() if name in _ENDING_IDS]
    tokens = fields.items("tokenizer.ggml.tokens", str)
    return list(dict.fromkeys(named + [index for index, token in enumerate(tokens) if token in _END_NAMES]))


# --- tokenizers


def _working(make: Callable[[], Any], where: object, way_out: str) -> Any:
    """A tokenizer that reads and writes a text; `CheckpointError` for whatever happens instead."""
    try:
        tokenizer = make()
        tokenizer.decode(tokenizer.encode("a b\u00e9\u65e5 12\n"), skip_special_tokens=True)
        return tokenizer
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:  # errors of several libraries, and panics, which are no `Exception`
        raise CheckpointError(f"{where} has no usable tokenizer ({shown(error)}): {way_out}") from error


def load_tokenizer(directory: Path) -> Any:
    """transformers' tokenizer of a checkpoint directory.

    Raises:
        CheckpointError: There is none or it cannot be read.
    """
    from transformers import AutoTokenizer

    # Old files ask for cleaning up: it drops spaces before punctuation, and of byte-level vocabularies only warns.
    options = {"clean_up_tokenization_spaces": False, "trust_remote_code": False}
    make = partial(AutoTokenizer.from_pretrained, directory, **options)
    return _working(make, directory, "add its tokenizer.json and tokenizer_config.json")


def gguf_tokenizer(fields: Fields) -> Any:
    """The tokenizer that a GGUF file's metadata describes, as transformers' `PreTrainedTokenizerFast`.

    Raises:
        CheckpointError: It is damaged, of another kind than byte-level BPE and SentencePiece, or cuts text in a way
            that is not known.
    """
    model, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    if model not in ("gpt2", "llama"):
        fields.refuse("tokenizer.ggml.model", model, "gpt2 or llama")
    if model == "gpt2" and pre not in _SPLITS_BY_NAME:
        fields.refuse("tokenizer.ggml.pre", pre, f"one of {', '.join(_SPLITS)} or an alias")
    return _working(partial(_make, fields, model, pre), fields.where, "download or convert it again")


def _make(fields: Fields, model: str, pre: str) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields.items("tokenizer.ggml.tokens", str))]
    types = fields.items("tokenizer.ggml.token_type", int) or [0] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not len(vocabulary) == len(tokens) == len(types) or max(map(len, ["", *tokens])) > _MOST_CHARACTERS:
        needed = f"each once, of up to {_MOST_CHARACTERS} characters, with a type"
        fields.refuse("tokenizer.ggml.tokens", tokens, needed)
    typed = list(zip(tokens, types, strict=True))
    control = [token for token, of in typed if of in (_UNKNOWN, _CONTROL) or token in _END_NAMES]
    others = [token for token, of in typed if of == _USER_DEFINED and token not in _END_NAMES]
    sentencepiece, ids = model == "llama", special_ids(fields)
    if sentencepiece:
        tokenizer = _sentencepiece(fields, vocabulary, tokens[ids.get("unknown", 0)])
    else:
        tokenizer = _byte_level(fields, vocabulary, pre, others)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in others])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=fields.text("tokenizer.chat_template", "") or None,
        add_bos_token=fields.flag("tokenizer.ggml.add_bos_token", sentencepiece or pre in _WHOLE_WORDS),
        add_eos_token=fields.flag("tokenizer.ggml.add_eos_token"), clean_up_tokenization_spaces=False,
        **{f"{word}_token": tokens[ids[name]] for name, word in _NAMES_IN_TRANSFORMERS.items() if name in ids},
    )  # fmt: skip


def _byte_level(fields: Fields, vocabulary: dict[str, int], pre: str, others: list[str]) -> Any:
    """Byte-level BPE: text is cut, and what is in a piece merged in the order of the merges; `others` are tokens as
    they are written, not by their bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges: list[Any] = [tuple(pair.split(" ", 1)) for pair in fields.items("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    by_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _SPLITS_BY_NAME[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, by_bytes])
    letters = [decoders.Replace(word, by_bytes.pre_tokenize_str(word)[0][0]) for word in others if word in _NO_BYTES]
    tokenizer.decoder = decoders.Sequence([*letters, decoders.ByteLevel()])
    return tokenizer


def _sentencepiece(fields: Fields, vocabulary: dict[str, int], unknown: str) -> Any:
    """SentencePiece: the whole text is merged, the pieces of the best scores first; what has no piece is bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = dict(zip(vocabulary, fields.items("tokenizer.ggml.scores", float), strict=True))
    merges = [
        (token[:place], token[place:]) for token in sorted(scores, key=lambda token: -scores[token])
        for place in range(1, len(token)) if token[:place] in vocabulary and token[place:] in vocabulary
    ]  # fmt: skip
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    first = fields.flag("tokenizer.ggml.add_space_prefix", True)
    blanks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if first else blanks
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts if first else parts[:-1])
    return tokenizer
