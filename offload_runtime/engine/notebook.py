"""What a notebook shows: bars while a model is loaded and answers, and an answer as a cell's result."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_runtime.engine.request import GenerationResult
    from offload_runtime.sampling import TokenLogprobs


_UNITS = {"prompt": " layers", "answer": " tokens"}


def is_notebook() -> bool:
    """Return whether a kernel of Jupyter runs this, whose cells show bars."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return running is not None and "IPKernelApp" in running.config


@contextmanager
def bars(*, in_bytes: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yield what shows how far each stage has come: (stage, done, total). A bar of tqdm each, in a notebook one of its
    widgets where `ipywidgets` is there."""
    from tqdm.auto import tqdm

    shown: dict[str, Any] = {}

    def update(stage: str, done: int, total: int) -> None:
        if stage not in shown:
            unit = {"unit": "B", "unit_scale": True} if in_bytes else {"unit": _UNITS[stage]}
            shown[stage] = tqdm(total=total, desc=stage, leave=False, **unit)
        shown[stage].update(done - shown[stage].n)
        if done >= total:
            shown[stage].close()

    try:
        yield update
    finally:
        for bar in shown.values():
            bar.close()


def as_html(result: GenerationResult) -> str:
    """Return an answer with its figures. Where log-probabilities were asked for, tokens are the more coloured the less
    likely the model took them to be, and say so with the likeliest under the pointer."""
    stats = result.stats
    figures = [f"{len(result.tokens)} tokens ({result.finish_reason})", f"{stats.tok_per_s:.1f} tokens/s"]
    figures += [f"{stats.tokens_per_pass:.1f} tokens a pass", f"first token {stats.time_to_first_token_s:.2f} s"]
    if stats.link_gbps is not None and stats.link_peak_gbps:
        figures.append(f"link {stats.link_gbps:.1f} of {stats.link_peak_gbps:.1f} GB/s")
    said = escape(result.text) if result.logprobs is None else "".join(map(_token, result.logprobs))
    about = f'<div style="color: gray; font-size: 85%">{escape(" · ".join(figures))}</div>'
    return f'<div style="white-space: pre-wrap">{said}</div>{about}'


def _token(one: TokenLogprobs) -> str:
    likely = [(text, logprob) for text, (_, logprob) in zip(one.top_texts, one.top, strict=True)]
    own = [] if one.token in dict(one.top) else [(one.text, one.logprob)]
    lines = [f"{text!r} {100 * math.exp(logprob):.1f} %" for text, logprob in [*own, *likely]]
    colour = f"rgba(255, 140, 0, {(1 - math.exp(one.logprob)) / 2:.2f})"
    return f'<span title="{escape(chr(10).join(lines))}" style="background: {colour}">{escape(one.text)}</span>'
