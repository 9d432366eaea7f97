"""What the documents name is there: files, headings, options, commands, fields of requests, every figure beside the
JSON that it is from; and the programs of examples/ run."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from option_table import with_table
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.cli.chat_commands import COMMANDS as OF_A_CHAT
from offload_runtime.config import RuntimeConfig
from offload_runtime.hardware import load_profile
from offload_runtime.plan.report import forecast
from offload_runtime.plan.search import plan_run
from offload_runtime.server.schema import ChatBody, CompletionBody
from offload_runtime.weights.neighbours import stored_kinds
from offload_runtime.weights.sources import describe_model

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests/data/configs"
PATHS = [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")), *sorted(ROOT.glob("docs/*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
PROGRAM: Any = typer.main.get_command(app)
COMMANDS: Any = PROGRAM.commands
RTX4090 = load_profile("rtx4090")


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def indented(text: str) -> list[str]:
    """The lines of indented blocks, continued ones joined."""
    return re.findall(r"^ {4,}(.+)$", re.sub(r"\\\n\s*", "", text), flags=re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[name]):
        if not link.startswith("https://"):
            path, _, fragment = " ".join(link.split()).partition("#")
            target = (ROOT / name).parent / path if path else ROOT / name
            assert target.exists(), link
            assert not fragment or fragment in anchors(target.read_text(encoding="utf-8")), link


@cache
def known_options() -> set[str]:
    """What a command or a tool takes."""
    options = {name for command in COMMANDS.values() for option in command.params for name in option.opts}
    for path in (*(ROOT / "tools").rglob("*.py"), *EXAMPLES.glob("*.py")):
        options.update(re.findall(r"[\"'/,](--[a-z][a-z-]+)[\"'/,]", path.read_text(encoding="utf-8")))
    torchrun = "--nnodes --nproc-per-node --node-rank --master-addr --master-port --max-restarts"
    options |= {*torchrun.split()}
    return options | {"--cov", "--help", "--version", "--install-completion", "--no-deps"}


@pytest.mark.parametrize("name", PAGES)
def test_options_and_files_in_code_are_there(name: str) -> None:
    code = "\n".join([*re.findall(r"`([^`\n]+)`", PAGES[name]), *indented(PAGES[name])])
    assert not set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)) - known_options()
    for path in re.findall(r"(?<![\w./])((?:tools|tests|examples)/[\w/]+\.py)", code):
        assert (ROOT / path).exists(), path


def test_commands_can_be_asked_for() -> None:
    lines = ((name, line.partition("offload-runtime ")[2]) for name, page in PAGES.items() for line in indented(page))
    asked = [(name, line) for name, line in lines if line]
    for _, line in asked:
        command, *words = shlex.split(line.partition(" < ")[0], comments=True)
        COMMANDS[command].make_context(command, words, parent=PROGRAM.context_class(PROGRAM))
    assert {line.split()[0] for name, line in asked if name == "docs/guide.md"} == set(COMMANDS)


@pytest.mark.slow
def test_the_program_of_the_readme_runs(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGES["README.md"], flags=re.DOTALL)
    exec(block.replace("path/or/id", str(target)), {})
    assert re.search(r"\d+\.\d+ \d+\.\d+\n", capsys.readouterr().out)


# --- figures: where result files are named every decimal number is in one of them, in the unit that is shown

SCALES = {"%": (100.0,), "ms": (1e3, 1.0), "GB": (1e-9,), "tokens/s": (1.0, 0.0)}  # 0 is the inverse
UNIT = r"%|\bx\b|\bms\b|GB/s|GB|MB|tokens/s|\bs\b"
Figure = tuple[frozenset[str], str, str]  # result files, unit, digits


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a result, without lists of tokens."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from () if key in ("tokens", "text", "next_token") and isinstance(part, list) else numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


@cache
def shown(names: frozenset[str], unit: str, digits: int) -> set[str]:
    """How the numbers of result files are written in a unit."""
    found = {n for name in names for n in numbers(json.loads((ROOT / "tools/results" / name).read_text()))}
    return {f"{n * scale or 1 / (n or 1):.{digits}f}" for n in found for scale in SCALES.get(unit, (1.0,))}


def is_shown(figure: Figure) -> bool:
    """Whether a figure is that of a result."""
    return figure[2] in shown(*figure[:2], len(figure[2].partition(".")[2]))


def results_in(text: str) -> frozenset[str]:
    """The result files that a text names."""
    return frozenset(re.findall(r"tools/results/([\w.-]+\.json)\)", text))


def figures(page: str) -> Iterator[Figure]:
    """The figures of a page, each with the result files of its row, else of its paragraph, else of its section."""
    for section in re.split(r"^#+ .*$", page, flags=re.MULTILINE):
        header: list[str] = []
        for block in re.split(r"\n\n|\n(?=\|)", section):
            cells = block.strip().split("|") if block.startswith("|") else [block]
            header = (header or cells) if len(cells) > 1 else []
            names = results_in(block) or results_in(section)
            for cell, title in zip(cells, header or [""], strict=True):
                if names and "in the paper" not in title and "| predicted |" not in block:
                    yield from ((names, *one) for one in figures_of(cell, title))


def figures_of(cell: str, title: str) -> Iterator[tuple[str, str]]:
    """Decimal numbers with their units, but for code, links, versions and settings."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|^ {4,}.*$|^!\[.*$|\d+(\.\d+){2,}|[\d.]+B\b", " ", cell, flags=re.MULTILINE)
    prose = re.sub(
        r"(T =|[Nn]oise|temperature|needle at|transformers|accelerate|Qwen|Llama-|arXiv)\s?[\d., and]+", "", prose
    )
    for listed, unit in re.findall(rf"((?:\d+(?:\.\d+)?(?:,\s|\sand\s|\sto\s|\s)*)+)({UNIT})?", prose):
        unit = unit or "".join(re.findall(UNIT, title)[:1])
        yield from ((unit, one) for one in re.findall(r"\d+\.\d+", listed))


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_figures_are_those_of_the_results(name: str) -> None:
    assert not [figure for figure in figures(PAGES[name]) if not is_shown(figure)]


def test_every_result_is_shown() -> None:
    assert {path.name for path in ROOT.glob("tools/results/*.json")} == results_in("".join(PAGES.values()))


@pytest.mark.few(4)
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("row", re.findall(r"^\| (.+) \| predicted \|$", PAGES["README.md"], flags=re.MULTILINE))
def test_the_readme_predicts_what_plan_does(row: str, draft: bool) -> None:
    name, mix, context, *speeds = re.fullmatch(r"(\S+) in (\S+), (\d+)K \| ([\d.]+) \| ([\d.]+)", row).groups()  # type: ignore[union-attr]
    small = "llama-3.2-1b" if "Llama" in name else "qwen2.5-0.5b"
    models = [describe_model(CONFIGS / one) for one in (name.lower(), small)]
    if mix != "bf16":
        kinds = (stored_kinds(model.config(), of) for model, of in zip(models, (mix, "Q8_0"), strict=True))
        models = [replace(model, kinds=stored) for model, stored in zip(models, kinds, strict=True)]
    request, card = RuntimeConfig(models[0], models[1] if draft else "none", context=1024 * int(context)), RTX4090
    predicted = forecast(plan_run(request, card), card)
    found = predicted.usual.tok_per_s if draft else predicted.plain_tok_per_s
    assert float(speeds[draft]) == pytest.approx(found, rel=0.05)


def test_the_readme_shows_what_plan_prints() -> None:
    _, command, shown = re.split(r"^    \$ offload-runtime (.+)$", PAGES["README.md"], flags=re.MULTILINE)
    words = [str(CONFIGS / word[2:].lower()) if word.startswith("./") else word for word in command.split()]
    lines = (line.strip() for line in CliRunner().invoke(app, words).stdout.splitlines())
    assert all(line.strip() in lines for line in indented(shown.partition("![")[0]))  # in this order


GUIDE, SERVER = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("guide.md", "server.md"))


def test_the_guide_lists_the_options_of_today() -> None:
    assert with_table(GUIDE) == GUIDE, "run `python tools/option_table.py docs/guide.md`"


def test_the_guide_lists_the_commands_of_a_chat() -> None:
    for name, one in OF_A_CHAT.items():
        assert f"| `{name} {one.argument.strip('[]')}".rstrip() + "` |" in GUIDE


def test_the_page_of_the_server_names_every_field() -> None:
    for body in (ChatBody, CompletionBody):
        for field in {*body.model_fields, *body.harmless} - {"messages", "prompt"}:
            assert re.search(rf"`{field}\b", SERVER), field


TARGET = "long_target"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def printed(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints when it is called with some words."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


SAYS = {
    "plan.py": "2048 tokens: 0 of 5 layers over the link",
    "generate.py": "the same tokens: True",
    "long_context.py": "tokens read in",
    "batch.py": "== Dear Sir or Madam,",
    "stream.py": "> And in the evening?",
    "asynchronous.py": "== A good book",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(
    target: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog and " * 100)
    words = [str(target), *([str(book)] if name == "long_context.py" else [])]
    assert SAYS[name] in printed(name, words, monkeypatch, capsys)


def test_every_example_is_run() -> None:
    elsewhere = {"ray_serve.py"}  # in test_ray_serve.py, where Ray is
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys() | elsewhere
