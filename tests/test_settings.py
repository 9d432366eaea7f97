"""Settings: what a TOML file and the environment say of options, and how to see what is said."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from tests.test_cli_fakes import FakeRuntime, invoke
from tests.test_cli_generate import error_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NEEDED = {"pull": ["a/b"], "rm": ["a/b"]}
FOR_ALL = """
target = "their/model"
vram = "20GB"
context = 4096
stop = ["a b", "c"]
temperature = 0.5
seed = 1
no_progress = true
[chat]
seed = 2
temperature = 0.25
[serve]
port = 9000
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of settings with a file."""
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path))
    (tmp_path / "config.toml").write_text(FOR_ALL)
    return tmp_path


def printed(command: str, *words: str, **variables: str) -> Result:
    return CliRunner().invoke(app, [command, *NEEDED.get(command, []), *words, "--print-config"], env=variables)


def test_what_is_typed_comes_before_variables_and_those_before_the_file(home: Path) -> None:
    runtime, variables = FakeRuntime(), {"OFFLOAD_RUNTIME_VRAM": "10GB", "OFFLOAD_RUNTIME_STOP": '["x", "y z"]'}
    stand_in = {"Runtime": runtime}
    first = invoke(["generate", "--prompt", "Hi", "--seed", "7"], stand_in, env=variables)
    second = invoke(["chat"], stand_in, input="Hi\n", env={"OFFLOAD_RUNTIME_STOP": ""})
    assert first.exit_code == second.exit_code == 0, first.stderr + second.stderr
    assert [(one.target, one.vram, one.context) for one in runtime.loads] == [
        ("their/model", 10 * 10**9, 4096), ("their/model", 20 * 10**9, 4096)
    ]  # fmt: skip
    (_, generated), (_, chatted) = runtime.requests
    assert (generated.sampling.seed, generated.sampling.temperature, generated.stop) == (7, 0.5, ("x", "y z"))
    assert (chatted.sampling.seed, chatted.sampling.temperature, chatted.stop) == (2, 0.25, ())


def test_a_named_file_stands_in_for_the_users_own(home: Path) -> None:
    other = home / "other.toml"
    other.write_text("target = 'other/model'")
    said = tomllib.loads(printed("chat", "--config", str(other), "--seed", "1234").stdout)["chat"]
    assert said == {"target": "other/model", "seed": 1234}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_can_be_said_in_a_file_and_by_a_variable(command: str, tmp_path: Path) -> None:
    """What is printed is such a file: with its comments taken for settings it says the same, and so do variables."""
    (tmp_path / "none.toml").write_text("")
    target = {} if command in ("profile", "list", "pull", "rm", "demo") else {"OFFLOAD_RUNTIME_TARGET": "a/model"}
    lines = printed(command, "--config", str(tmp_path / "none.toml"), **target).stdout.splitlines()
    values = [line.removeprefix("# ").partition("  # ")[0] for line in lines if " = " in line]
    options = {key for one in COMMANDS[command].params for key in one.opts if one.param_type_name == "option"}
    unset = {line.split()[1] for line in lines if line.endswith(" is not set")}
    named = {value.split(" = ")[0] for value in values} | unset
    assert {f"--{name}" for name in named} <= options and len(named) >= len(COMMANDS[command].params) - 3

    file = tmp_path / "all.toml"
    file.write_text("\n".join([f"[{command}]", *values]))
    again = printed(command, "--config", str(file))
    assert (again.exit_code, again.stderr) == (0, "")
    assert [
        line.partition("  # ")[0] for line in again.stdout.splitlines() if not line.startswith("#") and "=" in line
    ] == values
    variables = {f"OFFLOAD_RUNTIME_{key.upper().replace('-', '_')}": value.strip('"') for key, value in
                 (one.split(" = ") for one in values)}  # fmt: skip
    said = printed(command, "--config", str(tmp_path / "none.toml"), **variables)
    assert (said.exit_code, said.stderr) == (0, "")
    assert {line.partition("  # ")[2] for line in said.stdout.splitlines() if "  # " in line} == set(variables)


def test_a_key_is_not_shown(home: Path) -> None:
    shown = printed("serve", OFFLOAD_RUNTIME_API_KEY="very-secret").stdout
    assert "very-secret" not in shown and "# api-key is said by OFFLOAD_RUNTIME_API_KEY, and not shown" in shown


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("vram = ", "is not TOML: Invalid value (at end of document)"),
        ("vram = 24", "vram in {file} '24' is 24 bytes: write 24GB"),
        ("[generate]\nvarm = '1GB'", "varm in [generate] of {file} is no option of generate (did you mean vram?)"),
        ("[generate]\nport = 80", "port in [generate] of {file} is no option of generate"),
        ("[serve]\nprompt = 'x'", "prompt in [serve] of {file} is no option of serve"),
        ("[server]\nport = 80", "[server] in {file} is no command: there are generate, chat"),
        ("temperature = [1, 2]", "temperature in {file} takes one value, not a list"),
        ("temperature = true", "temperature in {file} must be a text or a number, not True"),
        ("stop = [['x']]", "stop in {file} must be a text or a number, not ['x']"),
        ("target = \"a\\u0000b\"", "target in {file} holds a NUL character"),
        ("no-progress = 'maybe'", "no-progress in {file} must be true or false, not 'maybe'"),
        ("kv = 'cpu'", "kv in {file} must be auto, gpu or host, not 'cpu'"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_named_where_the_file_says_it(written: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(written)
    result = CliRunner().invoke(app, ["generate", "--prompt", "Hi", "--target", "x", "--config", str(file)])
    assert result.exit_code == 2
    assert message.format(file=file) in error_lines(result)[0]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OFFLOAD_RUNTIME_TOP_P", "3", "must be in [0, 1] (1 is off), not 3.0"),
        ("OFFLOAD_RUNTIME_STOP", "[x", "begins with [ and is no list of TOML"),
        ("OFFLOAD_RUNTIME_VARM", "1GB", "is no option of any command (did you mean OFFLOAD_RUNTIME_VRAM?)"),
    ],
)
def test_what_makes_no_sense_is_named_by_its_variable(variable: str, value: str, message: str, home: Path) -> None:
    result = printed("generate", **{variable: value})
    assert result.exit_code == 2
    assert f"{variable} {message}" in error_lines(result)[0]


def test_a_file_that_is_not_there_is_named_if_it_was_asked_for(tmp_path: Path) -> None:
    result = printed("list", "--config", str(tmp_path / "absent.toml"))
    assert (result.exit_code, "No such file" in error_lines(result)[0]) == (2, True)
    assert printed("list", OFFLOAD_RUNTIME_CONFIG=str(tmp_path / "absent")).exit_code == 0


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.parametrize("name", ["offload-runtime.service", "Containerfile"])
def test_examples_set_what_there_is(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / name).read_text().replace("%S", str(tmp_path)).replace("%C", str(tmp_path))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    said = dict(re.findall(r"\b(OFFLOAD_RUNTIME_\w+)=(\S+)", "\n".join(lines)))
    assert {"OFFLOAD_RUNTIME_CONFIG", "OFFLOAD_RUNTIME_CACHE", "OFFLOAD_RUNTIME_STATE"} <= said.keys()
    result = printed("serve", "--target", "x", **said, OFFLOAD_RUNTIME_API_KEY="key")
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "offload-runtime.service"
    text, count = re.subn(r"ExecStart=\S+", f"ExecStart={sys.executable}", (EXAMPLES / unit.name).read_text())
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (count, done.returncode, done.stdout + done.stderr) == (1, 0, "")
