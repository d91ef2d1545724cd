"""`hvpipe migrate`: what it changes in a file, what it leaves and says, and how the diff applies."""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvpipe
from hvpipe import cli
from hvpipe.commands.migrate import Migration, migrate
from hvpipe.errors import HvpipeError


def moved(text: str) -> str:
    """Return a file with its imports moved. All of them can be."""
    result = migrate("train.py", text.encode())
    assert result.complete, result.notes
    return result.after.decode()


def notes(text: str, kind: str) -> list[tuple[int, str]]:
    return [(note.line, note.text) for note in migrate("train.py", text.encode()).notes if note.kind == kind]


def left(text: str) -> tuple[int, str]:
    """Return the line and the reason of the one import that stays. Nothing in the file changes."""
    result = migrate("train.py", text.encode())
    assert result.after == text.encode()
    assert result.lines == ()
    ((line, reason),) = notes(text, "not moved")
    return line, reason


# --- What moves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import horovod.tensorflow as hvd", "import hvpipe.horovod.tensorflow as hvd"),
        ("import os, horovod.keras as hvd , sys", "import os, hvpipe.horovod.keras as hvd , sys"),
        ("import horovod . keras  as hvd", "import hvpipe.horovod . keras  as hvd"),
        ("from horovod import tensorflow as hvd", "from hvpipe.horovod import tensorflow as hvd"),
        ("from  horovod.keras import *  # all", "from  hvpipe.horovod.keras import *  # all"),
        ("from\\\n\thorovod.keras import init", "from\\\n\thvpipe.horovod.keras import init"),
        (
            "from horovod.tensorflow import (\n  rank,\n)",
            "from hvpipe.horovod.tensorflow import (\n  rank,\n)",
        ),
        (
            "import horovod.tensorflow.keras\nhorovod.tensorflow.keras.init()",
            "import hvpipe.horovod.tensorflow.keras\nhvpipe.horovod.tensorflow.keras.init()",
        ),
        (
            "é = 'ß'; import horovod.keras; 'ü', horovod.keras.init()",
            "é = 'ß'; import hvpipe.horovod.keras; 'ü', hvpipe.horovod.keras.init()",
        ),
        ("import horovod\nprint(horovod)", "import hvpipe.horovod\nprint(hvpipe.horovod)"),
        (
            "def f():\n try:\n \timport horovod.keras as h\n except ImportError: h = None",
            "def f():\n try:\n \timport hvpipe.horovod.keras as h\n except ImportError: h = None",
        ),
        ("m = import_module(r'horovod.keras')", "m = import_module(r'hvpipe.horovod.keras')"),
        (
            "importlib.util.find_spec(name='''horovod''')",
            "importlib.util.find_spec(name='''hvpipe.horovod''')",
        ),
        ("import_module('horovod'\n '.keras')", "import_module('hvpipe.horovod'\n '.keras')"),
    ],
)
def test_what_moves(before: str, after: str) -> None:
    assert moved(before) == after
    assert moved(after) == after


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "# import horovod\n",
            "'import horovod.keras'\n",
            "from .horovod import x\n",
            "from . import horovod\n",
        ),
        *("import horovod_tools\n", "from my.horovod import keras\n", "horovod = 3\nprint(horovod)\n"),
        *(
            "import my.horovod.keras as hvd\n",
            "import_module('os')\n",
            "import_module(name)\n",
            "f(horovod=1)\n",
        ),
        *("import_module('.keras', 'pkg')\n", "import_module()\n", "import hvpipe.keras as hk\n"),
    ],
)
def test_what_is_not_horovod_stays(text: str) -> None:
    assert moved(text) == text


def test_a_file_of_both_frameworks() -> None:
    text = (
        "import horovod.tensorflow, horovod.torch\nprint(horovod.__version__)\n"
        "horovod.tensorflow.init()\nhorovod.torch.init()\n"
    )
    result = migrate("train.py", text.encode())
    assert result.after.decode() == (
        "import hvpipe.horovod.tensorflow, horovod.torch\nprint(horovod.__version__)\n"
        "hvpipe.horovod.tensorflow.init()\nhorovod.torch.init()\n"
    )
    assert result.lines == (1, 3)
    assert not result.complete


# --- What stays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("\nimport horovod.torch as hvd", 2, "horovod.torch has no counterpart.*Keras 3 on TensorFlow"),
        ("from horovod.spark import run", 1, "horovod.spark has no counterpart.*hvpipe run"),
        ("from horovod import ray", 1, "horovod.ray has no counterpart"),
        ("from horovod import keras, mxnet", 1, "horovod.mxnet has no .*the others in a line of their own"),
        ("from horovod.runner.common import x", 1, "horovod.runner.common has no counterpart.*hvpipe run"),
        ("from horovod.common.exceptions import HorovodInternalError", 1, "tensorflow.elastic has its exc"),
        ("from horovod.tensorflow import mpi_ops", 1, "horovod.tensorflow.mpi_ops has no counterpart"),
        ("from horovod.tensorflow import BroadcastGlobalVariablesHook", 1, "Hook has no counterpart"),
        ("import horovod\n\nhorovod.run(f)", 1, "line 3 needs it: horovod.run has no counterpart"),
        ("import horovod.keras\nhorovod = 3", 1, "line 2 binds the name horovod, too"),
        ("import horovod.keras\ndef f(hvpipe): pass", 1, "line 2 binds the name hvpipe, too"),
        ("import horovod.keras\ndef f():\n  global horovod", 1, "line 3 binds the name horovod, too"),
        ("import horovod.keras\nfrom x import horovod", 1, "line 2 binds the name horovod, too"),
        ("import horovod.keras\ntry: f()\nexcept E as horovod: pass", 1, "line 3 binds the name horovod"),
        ("import horovod.keras\nmatch f:\n  case {**horovod}: pass", 1, "line 3 binds the name horovod"),
        ("import_module('horovod.torch')", 1, "horovod.torch has no counterpart"),
        ("import_module('horovod.' + name)", 1, "only known when the script runs"),
        ("import_module(f'horovod.{name}')", 1, "only known when the script runs"),
        ("import_module('.keras', package='horovod')", 1, "the full name"),
        ("__import__('horovod.keras')", 1, r"import_module\('hvpipe.horovod.keras'\)"),
        ("import_module('\\x68orovod.keras')", 1, "an unusual way"),
        ("import horovod\nprint(f'{horovod=}')", 1, "would change more than names|inside a string"),
    ],
)
def test_what_stays(text: str, line: int, reason: str) -> None:
    at, says = left(text)
    assert at == line
    assert re.search(reason, says)


# --- Hints -----------------------------------------------------------------------------------------------

KERAS = "import horovod.keras as hvd\n"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (KERAS + "o = hvd.DistributedOptimizer(o)\nmodel.compile(o)", 2, "hk.data_parallel(model)"),
        (
            KERAS + "o = hvd.DistributedOptimizer(o, backward_passes_per_step=2)",
            2,
            "gradient_accumulation_steps",
        ),
        (KERAS + "\n@hvd.elastic.run\ndef train(): pass", 3, "docs/from-horovod.md"),
        ("from horovod.keras import elastic\nelastic.run(f)", 2, "docs/from-horovod.md"),
        ("hvd = import_module('horovod.keras')\nhvd.elastic.run(f)", 2, "docs/from-horovod.md"),
        ("import horovod.keras\nhorovod.keras.elastic.run(f)", 2, "docs/from-horovod.md"),
        (KERAS + "tf.config.set_visible_devices(g[hvd.local_rank()], 'GPU')", 2, "not needed"),
        ("os.environ['HOROVOD_FUSION_THRESHOLD'] = '1'", 1, "large buckets"),
        ("os.environ['HOROVOD_CYCLE_TIME'] = '1'", 1, "HOROVOD_CYCLE_TIME has no effect"),
        ("int(os.environ['HOROVOD_LOCAL_RANK'])", 1, "does not set HOROVOD_LOCAL_RANK"),
        ("mock.patch('horovod.keras.rank')", 1, "this string was left unchanged"),
        ("f('HOROVOD_AUTOTUNE')\nf('HOROVOD_AUTOTUNE')\nf('HOROVOD_AUTOTUNE')", 1, "(also lines 2, 3)"),
    ],
)
def test_hints_come_before_and_after_the_move(text: str, line: int, says: str) -> None:
    for version in (text, moved(text)):
        ((at, hint),) = notes(version, "hint")
        assert at == line
        assert says in hint


@pytest.mark.parametrize(
    "text",
    [
        KERAS + "hvd.DistributedOptimizer(o)",  # in a loop of the user
        "keras.DistributedOptimizer(o, backward_passes_per_step=2)\nmodel.fit(x)",  # not Horovod's
        "tf.config.set_visible_devices([], 'GPU')",
        "f('HOROVOD_TIMELINE', 'HOROVOD_LOG_LEVEL')",  # they have the same effect
        "strategy = 'horovod'\nlog = 'horovod.log'",
        "'''Set HOROVOD_CYCLE_TIME.'''",
    ],
)
def test_no_hint(text: str) -> None:
    assert notes(text, "hint") == []


# --- Bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_line_ends_and_marks_stay(line_end: bytes, mark: bytes) -> None:
    lines = [
        b"import horovod.keras as hvd",
        b"\x0c",
        b"def f():",
        b"\tx = 'a\\d'; from horovod import keras",
        b"",
    ]
    expected = [line.replace(b"horovod", b"hvpipe.horovod") for line in lines]
    assert migrate("train.py", mark + line_end.join(lines)).after == mark + line_end.join(expected)


@pytest.mark.parametrize("cookie", [b"latin-1", b"cp1252", b"utf-8"])
def test_the_encoding_stays(cookie: bytes) -> None:
    text = "# coding: " + cookie.decode() + "\nx = 'ÄÖ'; import horovod.keras as hvd  # ü\n"
    result = migrate("train.py", text.encode(cookie.decode()))
    assert result.after == text.replace("horovod", "hvpipe.horovod").encode(cookie.decode())


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"x = 1\nprint 'Python 2'\n", r"train.py:2: "),
        (b"x = '\xff'\n", "train.py"),
        (b"x = 1\x00\n", "train.py"),
        (b"# coding: no-such\n", "train.py"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "train.py"),
        (b"# coding: utf-7\nx = '+AOQ-'  # +AOQA5A-\ny = '+AGE-'\n", "would change when it is written again"),
    ],
)
def test_files_that_do_not_parse(raw: bytes, says: str) -> None:
    with pytest.raises(HvpipeError, match=rf"this Python can parse. Received: .*{says}"):
        migrate("train.py", raw)


def test_a_long_sum_is_no_deep_recursion() -> None:
    text = "import horovod.keras as hvd\nx = " + " + ".join(["1"] * 600) + "\n"
    assert moved(text) == text.replace("horovod", "hvpipe.horovod")


# --- Any file --------------------------------------------------------------------------------------------

MODULES = st.sampled_from(
    [
        "horovod",
        "horovod.keras",
        "horovod.tensorflow",
        "horovod.tensorflow.keras.callbacks",
        "horovod.torch",
        "os",
    ]
)
STATEMENTS = st.one_of(
    st.builds("import {}".format, MODULES),
    st.builds("import sys, {} as ö, horovod . keras as h".format, MODULES),
    st.builds("from  {} import x as y".format, MODULES),
    st.builds("from\\\n {} import (x,\n # ß\n y)".format, MODULES),
    st.builds("m = import_module( '{}' )".format, MODULES),
    st.builds("'ä€', {}.init(), f'é{{horovod.keras}}'".format, MODULES),
    st.sampled_from(
        [
            *("horovod = 1", "horovod.run(f)", "hvpipe = 2", "def f(horovod): pass", "'''ü\nhorovod\n'''"),
            *("f'''\n{horovod.keras.x:>{horovod.tensorflow.y}}'''", "x = '\\d'", "\x0c", "# horovod", ""),
            *("print(f'{horovod.keras.z=}')", "global horovod", "del horovod", "lambda *horovod: horovod"),
        ]
    ),
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Return a file of imports and uses, at any depth, in any encoding, with any line ends."""
    lines = []
    for statement in draw(st.lists(STATEMENTS, max_size=8)):
        block = draw(st.sampled_from(["", "", "if 1:", "def g():"]))
        lines.append(f"{block}\n\t{statement}\n\tpass" if block else statement)
    text = "\n".join(lines) + draw(st.sampled_from(["", "\n"]))
    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig", "cp1252"]))
    cookie = "# coding: cp1252\n" if encoding == "cp1252" else ""
    return (cookie + text).replace("\n", draw(st.sampled_from(["\n", "\r\n", "\r"]))).encode(encoding)


def parsed(raw: bytes) -> Migration | None:
    try:
        return migrate("train.py", raw)
    except HvpipeError:
        return None


@given(files())
def test_only_the_names_change_and_only_once(raw: bytes) -> None:
    result = parsed(raw)
    if result is None:  # such as `global` after a use
        return
    assert result.after.replace(b"hvpipe.horovod", b"horovod") == raw
    # bytes.splitlines knows the line ends of Python's tokenizer alone.
    lines = zip(result.after.splitlines(), raw.splitlines(), strict=True)
    assert result.lines == tuple(number for number, (new, old) in enumerate(lines, 1) if new != old)
    again = migrate("train.py", result.after)
    assert again.after == result.after
    assert again.lines == ()
    assert [note for note in again.notes if note.kind == "not moved"] == [
        note for note in result.notes if note.kind == "not moved"
    ]


@given(st.one_of(st.binary(), st.text().map(str.encode)))
def test_any_bytes_are_refused_or_stay(raw: bytes) -> None:
    result = parsed(raw)
    assert result is None or result.after == raw


# --- The moved script runs -------------------------------------------------------------------------------

SCRIPT = """
import horovod, horovod.tensorflow.keras
import horovod.tensorflow as tensorflow, importlib
from horovod import keras as hvd
from horovod.keras import callbacks

def train():
    import horovod.keras
    return horovod.keras.rank(), f"{horovod.tensorflow.keras.rank():>30}"

found = [train(), tensorflow.rank(), hvd.rank(), callbacks.rank()]
found += [importlib.import_module("horovod.keras").rank()]
"""


def test_the_moved_script_does_the_same_with_hvpipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules whose `rank` returns their own name take the place of both packages."""

    def install(prefix: str) -> None:
        for name in ("", ".keras", ".keras.callbacks", ".tensorflow", ".tensorflow.keras"):
            module = types.ModuleType(f"{prefix}horovod{name}")
            module.rank = lambda name=name: name
            monkeypatch.setitem(sys.modules, module.__name__, module)
            package, _, last = module.__name__.rpartition(".")
            if package:
                monkeypatch.setattr(sys.modules[package], last, module, raising=False)

    assert hvpipe.__name__ == "hvpipe"
    install("")
    install("hvpipe.")
    before: dict[str, object] = {}
    exec(SCRIPT, before)
    after: dict[str, object] = {}
    script = moved(SCRIPT)
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    exec(script, after)
    assert before["found"] == after["found"]
    assert after["hvd"].__name__ == "hvpipe.horovod.keras"


# --- The command -----------------------------------------------------------------------------------------


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a script that moves, one that does not, and one of something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_bytes(b"import horovod.keras as hvd\r\nhvd.init()")
    (tmp_path / "torch.py").write_bytes(b"import horovod.torch as hvd\n")
    (tmp_path / "other.py").write_bytes(b"import os\n")
    return tmp_path


def test_the_diff(scripts: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["migrate", "train.py", "other.py", "train.py"]) == 0
    output, errors = capfdbinary.readouterr()
    assert output == (
        b"--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,2 @@\n-import horovod.keras as hvd\r\n"
        b"+import hvpipe.horovod.keras as hvd\r\n hvd.init()\n\\ No newline at end of file\n"
    )
    assert errors == b"other.py: nothing to move\n"
    assert (scripts / "train.py").read_bytes().startswith(b"import horovod")


@pytest.mark.parametrize("program", [["git", "apply"], ["patch", "-p1", "--binary"]])
@pytest.mark.parametrize("name", ["train.py", "my train.py"])
def test_the_diff_applies(program: list[str], name: str, tmp_path: Path) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"needs {program[0]}")
    raw = codecs.BOM_UTF8 + "é = 'ü'\r\nimport horovod.keras\r\n\x0chorovod.keras.init()".encode()
    (tmp_path / name).write_bytes(raw)
    result = migrate(name, raw)
    subprocess.run(program, input=result.diff(), cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / name).read_bytes() == result.after


def test_what_cannot_be_moved_is_exit_code_1(scripts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "train.py", "torch.py"]) == 1
    output, errors = capsys.readouterr()
    assert output.startswith("--- a/train.py")
    assert errors.startswith("torch.py:1: not moved: horovod.torch has no counterpart")
    assert "\033" not in output + errors


def test_write(scripts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = scripts / "train.py"
    script.chmod(0o750)
    (scripts / "link.py").symlink_to("train.py")
    assert cli.main(["migrate", "--write", "link.py", "other.py"]) == 0
    assert capsys.readouterr().out == "link.py: changed lines: 1\n"
    assert script.read_bytes() == b"import hvpipe.horovod.keras as hvd\r\nhvd.init()"
    assert script.stat().st_mode & 0o777 == 0o750
    assert (scripts / "link.py").is_symlink()
    assert sorted(os.listdir(scripts)) == ["link.py", "other.py", "torch.py", "train.py"]


@pytest.mark.parametrize("bad", ["absent.py", ".", "bad.py"])
def test_one_bad_file_and_nothing_is_written(
    bad: str, scripts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scripts / "bad.py").write_text("if:\n")
    before = (scripts / "train.py").read_bytes()
    assert cli.main(["migrate", "--write", "train.py", bad]) == 2
    assert capsys.readouterr().err.startswith("hvpipe migrate: The files should be Python")
    assert (scripts / "train.py").read_bytes() == before


def test_a_file_that_cannot_be_written(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", deny)
    assert cli.main(["migrate", "--write", "train.py"]) == 2
    assert "Received: Permission denied" in capsys.readouterr().err
    assert sorted(os.listdir(scripts)) == ["other.py", "torch.py", "train.py"]


def test_json(scripts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "--json", "train.py", "torch.py"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["complete"], found["written"]) == (False, False)
    train, torch = found["files"]
    assert (train["file"], train["lines"], train["notes"]) == ("train.py", [1], [])
    assert train["diff"].startswith("--- a/train.py")
    assert (torch["diff"], torch["notes"][0]["line"], torch["notes"][0]["kind"]) == ("", 1, "not moved")


def test_colours_on_a_terminal_only(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hvpipe.commands.migrate.has_colours", lambda _: True)
    assert cli.main(["migrate", "train.py"]) == 0
    output = capsys.readouterr().out
    assert "\033[31m-import horovod.keras as hvd\033[0m" in output
    assert "\033[32m+import hvpipe.horovod.keras as hvd\033[0m" in output
