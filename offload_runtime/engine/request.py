"""From a prompt (a text, token ids, or chat messages through the model's template) to a request and its answer: tokens,
text, and the figures beside their bounds, whose field names are an interface.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from tokenizers import PreTokenizedString, pre_tokenizers

from offload_runtime.core import DraftBudget
from offload_runtime.engine.channels import Channels
from offload_runtime.engine.chat_template import ChatTemplate, MessageError
from offload_runtime.engine.spelling import TokenSpelling
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.fields import Fields
from offload_runtime.grammar import GrammarCompiler, GrammarMatcher
from offload_runtime.models.config import ModelConfig
from offload_runtime.options import is_of_type, require, require_unicode
from offload_runtime.params import GenerationParams
from offload_runtime.sampling import TokenLogprobs
from offload_runtime.speculation.step import Acceptance, Tally
from offload_runtime.weights.checkpoint import sampling_defaults

_SHOWN_CHARACTERS = 60  # of an answer, where a result is only named


@dataclass(frozen=True, repr=False)
class GenerationStats:
    """Figures of one generation.

    Attributes:
        prompt_tokens: Tokens of the prompt, those that were in the cache already included.
        new_tokens: Tokens generated, the end-of-sequence token included.
        time_to_first_token_s: From the call to the first token: mostly prefill.
        tok_per_s: Tokens after the first over the time after the first; 0 when there was only one.
        passes: Passes of the target after prefill that the answer had a part in. What follows of passes is of these, so
            that answers which begin and end together have the same figures.
        tokens_per_pass: Tokens after the first over passes.
        bytes_per_pass: Bytes over the link for one pass; of several cards over all links together.
        link_gbps: Bytes of these passes over their time, waiting and sampling included, in GB/s (1e9); of several cards
            over all links together.
        link_peak_gbps: Bandwidth of back-to-back copies, measured when the runtime was loaded; of several cards the sum
            of those that stream something, whose links were measured one after the other.
        stall_s: Time that the compute side waited for copies in these passes, not for experts that its kernels fetch
            or the CPU computes. The cards of a pass compute one after the other, and each waits for its own link while
            it has the rows: the sum is what the passes waited.
        peak_vram_bytes: Most device memory in use so far: by the driver on CUDA, by the ledger on the CPU.
        pinned_bytes: Page-locked host memory.
        acceptance: For every level of speculation what was proposed and accepted, the target's decisions last: with a
            retrieval verifier `draft` to `retrieval`, then `retrieval` to `target`. Empty for plain decoding.
        measured_s_per_pass: From pass to pass, proposing and sampling included, and others' prompts that they read;
            None without passes after prefill.
        predicted_s_per_pass: The same by the figures of the machine (see `Runtime.load`), for steps of as many
            proposals as these had and no prompts; a retrieval verifier is taken to accept as much as usual. None
            without figures.
        pageable_bytes: Host memory that is streamed and not page-locked: planned so, or because the system refused.
        link_idle_share: Share of the time of these passes, waiting and sampling included, in which no copy was on its
            way to the device; chunks that a retrieval verifier gathers are no copies. Of several cards the mean of the
            links that bring something. None where nothing is streamed, and where kernels fetch experts.
        hidden_draft_share: Share of the drafting in which a pass of the target was running or a link, of whichever
            card, brought what passes need; None without drafting, and without a trace (see `Runtime.load`).
        accepted_by_depth: In how many passes the target accepted a first proposal, a second one behind it, and so on.
        accepted_by_source: Proposals that the target accepted by who made them first: `ngram`, `draft`, `self` (a
            copy of the target), `retrieval` or a head, such as `mtp`.
        windows: Passes by what was asked for, the most frequent first: `tree 256`, `chain 8`, `ngram 16`, `plain`. The
            number is that of proposals, n-grams beside a chain not counted.
        kept_tokens: Tokens of the prompt that were not read again, as the cache still held them.
        expert_hit_rate: Share of the experts that layers of these passes needed, each once for all rows, which were on
            the device; None where all are, and where nothing was asked for.
        expert_bytes_per_pass: What of `bytes_per_pass` are experts.
        expert_cpu_share: Share of those experts that were not on the device which the CPU has computed.
        expert_cpu_gbps: How fast it has read them, in GB/s; None where it has computed none.
    """

    prompt_tokens: int
    new_tokens: int
    time_to_first_token_s: float
    tok_per_s: float
    passes: int
    tokens_per_pass: float
    bytes_per_pass: int
    link_gbps: float | None
    link_peak_gbps: float | None
    stall_s: float
    peak_vram_bytes: int
    pinned_bytes: int
    acceptance: tuple[Acceptance, ...]
    measured_s_per_pass: float | None = None
    predicted_s_per_pass: float | None = None
    pageable_bytes: int = 0
    link_idle_share: float | None = None
    hidden_draft_share: float | None = None
    accepted_by_depth: tuple[int, ...] = ()
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)
    expert_hit_rate: float | None = None
    expert_bytes_per_pass: int = 0
    expert_cpu_share: float = 0.0
    expert_cpu_gbps: float | None = None
    kept_tokens: int = 0

    def __repr__(self) -> str:
        first = f"{self.prompt_tokens} + {self.new_tokens} tokens, first after {self.time_to_first_token_s:.2f} s"
        return f"<GenerationStats: {first}, {self.tok_per_s:.1f} tokens/s, {self.tokens_per_pass:.2f} a pass>"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name, ready for JSON."""
        levels = [
            {**asdict(level), "rate": level.rate, "accepted_per_verification": level.accepted_per_verification}
            for level in self.acceptance
        ]
        return {**asdict(self), "acceptance": levels, "accepted_by_depth": list(self.accepted_by_depth)}


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """A finished generation.

    `finish_reason` is `stop` (end of sequence or a stop string), `length` or `interrupted`. `logprobs` are those of
    the tokens, one after the other, and `prompt_logprobs` those of the prompt's behind the first; None where they were
    not asked for. `stop_string` is the one of `stop` that has ended the answer.
    """

    tokens: list[int]
    text: str
    finish_reason: str
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_string: str | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN_CHARACTERS else f"{self.text[:_SHOWN_CHARACTERS]}…"
        speed = f"{self.stats.tok_per_s:.1f} tokens/s"
        return f"<GenerationResult: {len(self.tokens)} tokens ({self.finish_reason}), {speed}: {text!r}>"

    def _repr_html_(self) -> str:
        from offload_runtime.engine.notebook import as_html

        return as_html(self)


_LAST_PRIVATE = 0x10FFFD  # the last character that Unicode leaves to everyone's own use
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class IncrementalDecoder:
    """Turns tokens into text as they come, without cutting a character in two.

    A piece is the difference between the decoded text with and without the newest tokens, behind the tokens of the
    piece before, so spaces that depend on those come out right (as in vLLM's detokenizer).

    Args:
        tokenizer: A transformers tokenizer.
        context: Tokens before the first one (the end of the prompt).
    """

    _CONTEXT_TOKENS = 6

    def __init__(self, tokenizer: Any, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The last piece, of which so many are shown, and what is new. A piece begins with a whole character: a run of
        # byte tokens that does not is decoded to nothing but replacement characters by sentencepiece-like tokenizers.
        self._tokens = self._end_of(context)
        self._num_shown = len(self._tokens)

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is still incomplete."""
        self._tokens.append(token)
        piece = self.flush()
        if not piece or piece.endswith("\ufffd"):
            return ""
        del self._tokens[: self._num_shown]
        self._num_shown = len(self._tokens)
        return piece

    def flush(self) -> str:
        """Return what is left at the end, incomplete characters included."""
        before = self._tokenizer.decode(self._tokens[: self._num_shown], skip_special_tokens=True)
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True)[len(before) :]

    def _end_of(self, context: Sequence[int]) -> list[int]:
        """Return the last tokens, beginning with a whole character (of at most four bytes)."""
        for extra in range(4):
            end = list(context[-self._CONTEXT_TOKENS - extra :])
            if not self._tokenizer.decode(end, skip_special_tokens=True).startswith("\ufffd"):
                return end
        return list(context[-self._CONTEXT_TOKENS :])


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what may become one.

    The one that is complete first ends the text, of several with the same end the longest: however the text is cut into
    pieces, what is shown of it is the same.

    Args:
        stops: Strings that end the text; none of them is shown.

    Attributes:
        found: The one that has ended it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> tuple[str, bool]:
        """Return text that may be shown now, and whether a stop string was completed."""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            _, at, self.found = min(found)
            return text[:at], True
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def flush(self) -> str:
        """Return what was held back and turned out to be ordinary text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class SpelledTokens:
    """Keeps text of messages that spells a control token (`<|im_end|>`) apart from the tokens that the chat template
    writes.

    The first character of every such spelling is a private one while the template works on it, and while control tokens
    are looked for. A second tokenizer puts it back behind that search, before it splits text, so text is split and
    merged as a whole, as it would be if nothing in the messages were a control token. What only becomes such a spelling
    where a template joins texts is the template's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, added = tokenizer, tokenizer.added_tokens_decoder
        self._control = {number: token.content for number, token in added.items() if token.special}
        firsts = sorted({spelling[0] for spelling in self._control.values()})
        self._private = {first: chr(_LAST_PRIVATE - number) for number, first in enumerate(firsts)}
        self._first = {private: first for first, private in self._private.items()}
        self._starts = re.compile(f"(?={'|'.join(map(re.escape, self._control.values())) or '(?!)'}).", re.DOTALL)

    def hide(self, messages: Any) -> Any:
        """Return messages with private characters. Raises `OptionError` if they need some and have others already."""
        hidden = _each_text(messages, lambda text: self._starts.sub(lambda found: self._private[found[0]], text))
        fine = hidden == messages or _each_text(messages, self.show) == messages
        require(fine, "messages that spell a control token cannot have U+10FFFD or private characters close to it")
        return hidden

    def show(self, text: str) -> str:
        """Return text without private characters."""
        return text.translate(str.maketrans(self._first))

    def encode(self, text: str) -> list[int]:
        """Return token ids of text with private characters.

        Raises:
            OptionError: The tokenizer makes a control token of text even where it does not look for one.
        """
        encoded = self._second(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            fine = token not in self._control or self._first.keys().isdisjoint(text[start:end])
            require(fine, f"this tokenizer makes {self._control.get(token)!r} even of plain text: do not spell it")
        return list(encoded["input_ids"])

    @cached_property
    def _second(self) -> Any:
        fine, name = hasattr(self._tokenizer, "backend_tokenizer"), type(self._tokenizer).__name__
        require(fine, f"this model's tokenizer, {name}, cannot keep spelled control tokens apart: do not spell any")
        second = deepcopy(self._tokenizer)  # takes a second where the vocabulary is large
        own = second.backend_tokenizer.pre_tokenizer
        steps = [pre_tokenizers.PreTokenizer.custom(self), *([] if own is None else [own])]
        second.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return second

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """Put first characters back where they were, for the second tokenizer."""
        text.normalize(lambda part: part.map(self.show))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return the same with every text in it changed, keys as well: those of a tool's parameters are a user's."""
    if isinstance(value, dict):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each_text(item, change) for item in value)
    return change(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class PromptRoom:
    """Holds what prompts and their options have to go with: the model's `tokenizer` and `config`, `context_tokens` that
    are reserved, whether messages may spell control tokens, what the model's `generation_config.json` says, the
    tokens that end an answer, and whether it comes in channels."""

    tokenizer: Any
    config: ModelConfig
    context_tokens: int
    allow_special_tokens: bool = False
    generation: Fields = field(default_factory=lambda: Fields("", {}))
    eos_token_ids: frozenset[int] = frozenset()
    has_channels: bool = False

    @cached_property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Return what `Runtime.sampling_defaults` says."""
        return sampling_defaults(self.generation)

    def check(self, params: GenerationParams) -> GrammarMatcher | None:
        """Judge options by the model: what binds an answer to its schema or grammar, if it has one.

        Raises:
            OptionError: The model does not have a token of the logit bias or of those that stop, or the schema or
                grammar cannot be followed.
        """
        for token, _ in params.sampling.biases:
            fine = token < self.config.vocab_size
            require(fine, f"logit_bias of token {token} is outside the vocabulary of {self.config.vocab_size}")
        for token in params.stop_token_ids:
            fine = token < self.config.vocab_size
            require(fine, f"stop_token_ids has {token}, outside the vocabulary of {self.config.vocab_size}")
        return self._grammars.compile(params.sampling) if params.sampling.has_grammar else None

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.config.vocab_size, self.eos_token_ids)

    def encode(
        self, prompt: Prompt, template_options: Mapping[str, Any] | None = None, *, continue_final_message: bool = False
    ) -> list[int]:
        """Return token ids of a prompt: of text, token ids or chat messages, the last as of `encode_chat`.

        Raises:
            OptionError: It is empty, not a prompt, not Unicode text, or has ids outside the vocabulary.
        """
        is_chat = is_of_type(prompt, Sequence[Mapping]) and bool(prompt)
        fine = is_chat or not (template_options or continue_final_message)
        require(fine, "options of a chat template are for chat messages alone")
        if isinstance(prompt, str):
            require_unicode("the prompt", prompt)
            tokens = list(self.tokenizer.encode(prompt))
        elif is_chat:
            messages = [dict(item) for item in prompt if isinstance(item, Mapping)]
            _, tokens = self.encode_chat(
                messages, template_options=template_options, continue_final_message=continue_final_message
            )
        else:
            fine = is_of_type(prompt, Sequence[int])
            require(fine, "a prompt is a text, a list of token ids or a list of chat messages")
            tokens = [int(item) for item in prompt if not isinstance(item, Mapping)]
        require(bool(tokens), "the prompt is empty: give it at least one token")
        return self._in_vocabulary(tokens)

    def _in_vocabulary(self, tokens: list[int]) -> list[int]:
        """Return the same, once the model has all of them: its tokenizer may have more."""
        vocab_size = self.config.vocab_size
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            raise OptionError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
        return tokens

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the model's template. Raises `OptionError` if it has none."""
        has_template = getattr(self.tokenizer, "chat_template", None) is not None
        require(has_template, "this model has no chat template: use a plain prompt (generate without --chat)")
        return ChatTemplate(self.tokenizer)

    @cached_property
    def _spelled(self) -> SpelledTokens:
        return SpelledTokens(self.tokenizer)

    def encode_chat(
        self, messages: list[dict[str, Any]], seen: tuple[str, Sequence[int]] = ("", ()), *,
        template_options: Mapping[str, Any] | None = None, continue_final_message: bool = False,
    ) -> tuple[str, list[int]]:  # fmt: skip
        """Return chat messages as the text the model was trained on, with the beginning of an answer, and its token
        ids.

        Args:
            messages: A role, a content and whatever else the template reads, such as `tool_calls`.
            seen: Where the text begins with that of `seen`, this part has the tokens there.
            template_options: What else the template is given: `tools`, `enable_thinking` and so on. Text in it that
                spells a control token is text, too.
            continue_final_message: The last message is an answer's beginning, which the text ends with.

        Raises:
            OptionError: There is no template, it refuses the messages, or the last one is no answer that can go on;
                `MessageError`: as of `ChatTemplate.adapted`.
        """
        options = dict(template_options or {})
        if continue_final_message:
            last, where = messages[-1], f"messages.{len(messages) - 1}"
            if last.get("role") != "assistant" or last.get("tool_calls") or len(messages) == 1:
                raise MessageError(where, " is no text of the assistant's behind a question, which alone can go on")
        given = self.chat_template.adapted(messages, with_tools=bool(options.get("tools"))), options
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() | {"conversations", "messages"}
        reserved = (options.keys() & taken) - {"tools", "documents"}
        require(not reserved, f"{', '.join(sorted(reserved))} cannot be an option of the chat template")
        hidden = given if self.allow_special_tokens else self._spelled.hide(given)
        try:
            complete, begun = (hidden[0][:-1], hidden[0][-1]) if continue_final_message else (hidden[0], None)
            text = self.chat_template.render(complete, hidden[1])
            self.chat_template.require_shown(complete, hidden[1], text)
        except MessageError:
            raise
        except Exception as error:  # templates raise whatever they like about the messages
            raise OptionError(f"the chat template refused the messages: {error}") from error
        text = text if begun is None else self.chat_template.begun(text, begun)
        shown = text if hidden == given else self._spelled.show(text)
        before, tokens = seen if shown.startswith(seen[0]) else ("", ())
        rest = text[len(before) :]
        require_unicode("the prompt", rest)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        new_tokens = (encode if shown.endswith(rest) else self._spelled.encode)(rest)
        return shown, [*tokens, *self._in_vocabulary(new_tokens)]

    def fit(
        self, prompt: Prompt, max_new_tokens: int, *, name: str = "the prompt", option: str = "--max-new-tokens"
    ) -> list[int]:
        """Return token ids of a prompt that leaves room for its answer, which `option` makes shorter.

        Raises:
            ContextLengthError: It does not; OptionError: as of `encode`.
        """
        tokens = self.encode(prompt)
        room = self.context_tokens - len(tokens)
        if room < max_new_tokens:
            raise ContextLengthError(
                f"{name} of {len(tokens)} tokens and {max_new_tokens} new ones exceed the context of "
                f"{self.context_tokens} tokens by {max_new_tokens - room}: raise --context (the model allows "
                f"{self.config.max_position_embeddings}), shorten the prompt or lower {option}"
            )
        return tokens

    def fit_all(self, prompts: Sequence[Prompt], max_new_tokens: int | Sequence[int]) -> list[list[int]]:
        """Return the same of several, of answers of one length or of one for each; errors say which of several it
        is."""
        counts = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        fitting = []
        for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True), start=1):
            try:
                fitting.append(self.fit(prompt, count))
            except (OptionError, ContextLengthError) as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {number} of {len(prompts)}: {error}") from error
        return fitting


class Request:
    """One prompt on its way to an answer: it waits for a slot, then runs until a `finish_reason` is there.

    Args:
        prompt: Token ids.
        params: What was asked for.
        tokenizer: Turns tokens into text.
        eos_token_ids: Tokens that end the answer, unless `params` ignores them.
        budget: What is proposed in every step; None where it is chosen for each.
        matcher: Of the schema or grammar in `params`, as `PromptRoom.check` gives it, for this request alone.
        has_channels: The model's answers come in channels, but for those that a schema or grammar binds.
    """

    def __init__(
        self, prompt: Sequence[int], params: GenerationParams, tokenizer: Any, eos_token_ids: frozenset[int], *,
        budget: DraftBudget | None, matcher: GrammarMatcher | None = None, has_channels: bool = False,
    ) -> None:  # fmt: skip
        self.params, self.budget, self.matcher = params, budget, matcher
        self.slot = -1  # its batch row in the caches, once it runs
        self.num_kept = 0  # leading tokens of the prompt that its slot holds by then
        self.prompt_tokens = len(prompt)
        self.sequence = list(prompt)  # prompt and answer; grows, so that no step copies it
        self.finish_reason: str | None = None  # `stop`, `length` or `interrupted`
        self.result: GenerationResult | None = None  # once it has left the engine
        # What it took so far: seconds on one clock, 0 for what has not come yet.
        self.started_s = self.first_token_s = self.last_token_s = 0.0
        # Steps by their choice and number of sequences: how many, and the sum of the sequences' mean lengths.
        self.steps: dict[tuple[DraftBudget, int], tuple[int, int]] = {}
        self.tally = Tally()
        self.logprobs: list[TokenLogprobs] = []  # of the answer's tokens, where they are wanted
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens behind the first, likewise
        self.acceptance: Sequence[Acceptance] = ()  # once it is finished
        # What ends the answer, once it has `min_tokens`.
        self.end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._tokenizer, self._has_channels = tokenizer, has_channels and matcher is None
        self._begin_text()

    def _begin_text(self) -> None:
        """Make ready for the first token of the answer."""
        self._pieces: list[str] = []
        self._decoder = IncrementalDecoder(self._tokenizer, self.sequence)
        self._stops = StopStrings(self.params.stop)
        self._channels = Channels.of_answer(self._tokenizer, self.sequence) if self._has_channels else None

    @property
    def tokens(self) -> list[int]:
        """Return the answer so far."""
        return self.sequence[self.prompt_tokens :]

    @cached_property
    def spelling(self) -> TokenSpelling:
        """Return what spells its tokens, where their log-probabilities are told."""
        return TokenSpelling(self._tokenizer)

    @property
    def new_tokens(self) -> int:
        """Return how many tokens the answer has."""
        return len(self.sequence) - self.prompt_tokens

    @property
    def text(self) -> str:
        """Return the answer so far, but for what is held back as it may become a stop string."""
        return "".join(self._pieces)

    @property
    def said(self) -> str:
        """Return the same without what was thought in a channel, which no template reads again."""
        return self.text if self._channels is None else self._channels.without_thoughts(self.text)

    @property
    def stop_string(self) -> str | None:
        """Return the stop string that has ended the answer."""
        return self._stops.found

    @property
    def room(self) -> int:
        """Proposals in a row that the answer has room for: the target's own token always comes on top, so -1 where it
        may not grow any more."""
        return self.params.max_new_tokens - self.new_tokens - 1

    def push(self, token: int) -> str:
        """Append a token, which may finish the request; the text that may be shown now."""
        self.sequence.append(token)
        if token in self.end_token_ids:
            return self.finish("stop")
        complete = self.matcher is not None and self.matcher.advance(token)
        piece, stopped = self._decode(token)
        if stopped:
            self.finish_reason = "stop"  # what is held back belongs to the stop string
        if stopped or (self.room >= 0 and not complete):
            return piece
        return piece + self.finish("stop" if complete else "length")

    def _decode(self, token: int) -> tuple[str, bool]:
        """Return the text that the newest token lets be shown, and whether a stop string is complete."""
        piece, written, stopped = self._decoder.push(token), "", False
        if self._channels is not None:
            piece, written = self._channels.push(piece, token)
        if not self.params.min_tokens or self.new_tokens >= self.params.min_tokens:
            piece, stopped = self._stops.push(piece)
        if written and not stopped:  # no stop string is in what marks are written as, nor goes across one
            piece += self._stops.flush() + written
        self._pieces.append(piece)
        return piece, stopped

    def cut(self, count: int) -> None:
        """End the answer behind its first `count` tokens, fewer than it has: it was interrupted there, also where it
        has ended in the meantime."""
        kept = self.tokens[:count]
        del self.sequence[self.prompt_tokens :], self.logprobs[count:]
        self._begin_text()
        for token in kept:
            self.sequence.append(token)
            self._decode(token)
        self.finish("interrupted")
        if self.result is not None:
            logprobs = None if self.result.logprobs is None else tuple(self.logprobs)
            self.result = replace(
                self.result, tokens=kept, text=self.text, finish_reason="interrupted", logprobs=logprobs,
                stop_string=None, stats=replace(self.result.stats, new_tokens=count),
            )  # fmt: skip

    def finish(self, reason: str) -> str:
        """End the answer for this reason; the text that was held back."""
        self.finish_reason = reason
        rest, written = self._decoder.flush(), ""
        if self._channels is not None:
            rest, written = self._channels.finish(rest)
        rest, stopped = self._stops.push(rest)
        rest += "" if stopped else self._stops.flush() + written
        self._pieces.append(rest)
        return rest
