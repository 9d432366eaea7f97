"""What an answer is bound to, a JSON schema or a grammar: a mask of the tokens that may come next, for every row.

A grammar binds the target alone. A row's mask is that of its own path, so that its token is the one of plain decoding
under the same grammar; drafts need not know the grammar, as proposals that it forbids are taken out before the pass.
Masks are computed on the host once the pass is enqueued, while the device works on it. By llguidance, an extra that is
imported where somebody asks for a grammar; a compiled one takes up to 50 MB of host memory. What would end a process
ends another one than this (`grammar_process.py`).
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from offload_runtime.errors import GrammarError, OptionError
from offload_runtime.grammar_process import JSON_OPTIONS, GrammarFactory, GrammarProcess, reason_of
from offload_runtime.params import SamplingParams, require_exact_numbers
from offload_runtime.stream.device import upload

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_WORD_BITS = 32
_MOST_TOKEN_BYTES = 1023  # of llguidance
# Matchers that are made of one compiled grammar: those of a request's many answers. They share its lexer, whose states
# are limited.
_MOST_COPIES = 64


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that a schema allows, as a part of a grammar in llguidance's Lark. Raises `OptionError`."""
    require_exact_numbers(schema)
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


class GrammarCompiler:
    """Makes matchers of grammars, for one model. Any thread may call it.

    Args:
        tokenizer: A transformers tokenizer.
        vocab_size: Of the logits; tokens that the tokenizer does not have are never allowed.
        eos_token_ids: What may end an answer, where its grammar is satisfied.

    Raises:
        OptionError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        try:
            from llguidance import LLExecutor
        except ImportError as error:
            needed = "json_schema and grammar need llguidance: pip install 'offload-runtime[schemas]'"
            raise OptionError(needed) from error
        try:
            text = _spelling_no_control_token(tokenizer)
        except (ValueError, AttributeError, LookupError, TypeError) as error:  # it has no JSON, or one of another kind
            raise OptionError(f"answers of this model's tokenizer cannot be bound to a grammar: {error}") from error
        arguments = text, max(vocab_size, len(tokenizer)), sorted(eos_token_ids)
        self._process = GrammarProcess(*arguments)  # reads the tokenizer while this one does
        self._factory, self._executor = GrammarFactory(*arguments), LLExecutor()
        self._process.require_ready()
        self._lock = threading.Lock()
        self._copies: Iterator[LLMatcher] = iter(())
        self._of = "", ""  # what these are copies of

    def compile(self, params: SamplingParams) -> GrammarMatcher:
        """Return what binds one answer. Takes a few milliseconds, and up to a few seconds for the largest schemas, but
        nothing for the next ones with the same.

        Raises:
            OptionError: The schema or grammar is none, or has something that cannot be enforced.
        """
        if params.grammar is not None:
            asked = "grammar", params.grammar
        else:
            asked = "json_schema", cast(str, params.json_schema)
        with self._lock:
            copy = next(self._copies, None) if asked == self._of else None
            if copy is None:
                self._process.check(*asked)
                matcher = self._factory.matcher(*asked)
                self._of, self._copies = asked, (matcher.deep_copy() for _ in range(_MOST_COPIES))
                copy = next(self._copies)
        return GrammarMatcher(copy, self._executor, -(-self._factory.tokenizer.vocab_size // _WORD_BITS))


class GrammarMatcher:
    """Knows how far one answer has come through its grammar. Its methods are for one thread at a time.

    Args:
        matcher: llguidance's.
        executor: Computes masks in several threads.
        num_words: Of a mask, of 32 tokens each.
    """

    def __init__(self, matcher: LLMatcher, executor: LLExecutor, num_words: int) -> None:
        self._matcher, self.executor, self.num_words = matcher, executor, num_words

    def advance(self, token: int) -> bool:
        """Note the answer's next token, and return whether it is complete, so that nothing may follow."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return which nodes the grammar allows, ascending, of those that follow the answer so far (-1) or one another.
        An end token behind a complete answer is allowed.

        Whole paths are tried on one copy, which takes 150 µs behind 5000 tokens: a tree of 256 nodes takes 2 ms there,
        with a copy for each of them 63 ms.
        """
        trial, found = self._matcher.deep_copy(), set[int]()
        for leaf in set(range(len(tokens))).difference(parents):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            found.update(path[: trial.validate_tokens([tokens[node] for node in path])])
        return sorted(found)

    def states(self, tokens: Sequence[int], parents: Sequence[int]) -> list[LLMatcher | None]:
        """Return the state behind each row of a window, whose first token is the answer's last; None where the grammar
        forbids it."""
        found: list[LLMatcher | None] = [self._matcher.deep_copy()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            before = found[parent]
            state = None if before is None else before.deep_copy()
            found.append(None if state is None or state.try_consume_tokens([token]) != 1 else state)
        return found

    def require_next(self, tokens: Sequence[int], slot: int) -> None:
        """Raise `GrammarError` if there is no token to follow the answer and these."""
        state = self._matcher.deep_copy()
        state.consume_tokens(list(tokens))
        state.compute_bitmask()
        if state.is_error():
            raise GrammarError(f"the answer cannot go on as its schema or grammar demands: {reason_of(state)}", slot)


def token_masks(
    matchers: Sequence[GrammarMatcher | None], windows: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Return which tokens may follow each row of windows, one bit a token. Waits for the host's threads, not for the
    device.

    Args:
        matchers: Of each window, at least one.
        windows: Tokens and parents; the first token is the last one that the window's matcher has got.
        device: Where the masks are wanted; they are enqueued on the current stream.

    Returns:
        [R, W] int32: all ones for rows without a grammar, none where a grammar cannot go on.
    """
    made = [matcher for matcher in matchers if matcher is not None]
    shape = sum(len(tokens) for tokens, _ in windows), made[0].num_words
    masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
    states: list[tuple[LLMatcher, int]] = []
    first = 0
    for matcher, (tokens, parents) in zip(matchers, windows, strict=True):
        found = [] if matcher is None else matcher.states(tokens, parents)
        states += [(state, first + row) for row, state in enumerate(found) if state is not None]
        first += len(tokens)
    made[0].executor.unsafe_compute_mask_ptr(states, masks.data_ptr(), masks.stride(0) * masks.element_size(), first)
    for state, row in states:
        if state.is_error():  # its mask is not to be trusted
            masks[row] = 0
    return upload(masks, device)


def masked(logits: Tensor, masks: Tensor) -> Tensor:
    """Return logits [R, V] with -inf where masks [R, W] exclude a token."""
    bits = masks.unsqueeze(-1).bitwise_right_shift(torch.arange(_WORD_BITS, dtype=torch.int32, device=masks.device))
    excluded = bits.bitwise_and_(1).flatten(1)[:, : logits.shape[1]] == 0
    return logits.masked_fill(excluded, -torch.inf)


def _spelling_no_control_token(tokenizer: Any) -> str:
    """A tokenizer as JSON, but that no text spells its control tokens: else what has to be `"<|im_end|>"` in an answer
    would be the token, which ends it. Grammars write them by number: `<[2]>`. Tokens of more bytes than llguidance
    takes (a line of dashes) are like control tokens there, so that no answer of a grammar has one."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model, secret, hidden = described["model"], secrets.token_hex(16), dict[str, str]()
    is_list = isinstance(model["vocab"], list)  # of Unigram
    pieces = list(model["vocab"] if is_list else model["vocab"].items())
    added = {token["content"] for token in described["added_tokens"]}
    ids = [(piece, number if is_list else value) for number, (piece, value) in enumerate(pieces)]
    described["added_tokens"] += [
        {"id": number, "content": piece, "special": False, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for piece, number in ids if _is_too_long(piece) and piece not in added
    ]  # fmt: skip
    for token in described["added_tokens"]:
        if token["special"] or _is_too_long(token["content"]):
            token["special"] = True
            hidden[token["content"]] = token["content"] = f"{secret}{token['id']}"
    pieces = [(hidden.get(piece, piece), value) for piece, value in pieces]
    model["vocab"] = pieces if is_list else dict(pieces)
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if hidden.keys().isdisjoint([*pair, "".join(pair)])]
    return json.dumps({**described, "truncation": None, "padding": None})


def _is_too_long(token: str) -> bool:
    return len(token) > _MOST_TOKEN_BYTES or len(token.encode()) > _MOST_TOKEN_BYTES
