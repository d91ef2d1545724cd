"""`.ci/image.py` reads the Dockerfile as docker does, and refuses what it does not know."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from manifests import IMAGE_FILES

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("image")


def test_the_dockerfile(image: Any) -> None:
    first, (build, last) = image.parse(DOCKERFILE)
    assert first == {"PYTHON": "3.12"}
    assert (
        image.expanded(build.base, first) == image.expanded(last.base, first) == "python:3.12-slim-bookworm"
    )
    assert [each.rest for each in last.instructions if each.word in ("USER", "WORKDIR")] == ["train", "/work"]
    copied = [each.rest for each in last.instructions if each.word == "COPY"]
    assert "--from=build /opt/hvpipe /opt/hvpipe" in copied
    assert {f"{file.relative_to(ROOT)} {path}" for path, file in IMAGE_FILES.items()} <= set(copied)
    installed = " ".join(each.rest for each in last.instructions if each.word == "RUN")
    assert "openssh-server" in installed
    assert not re.search(r"\bg\+\+|\bgcc|-dev\b|HEALTHCHECK", installed)


def test_the_apptainer_definition_is_that_of_the_dockerfile(image: Any) -> None:
    made = image.apptainer(DOCKERFILE)
    assert (ROOT / "hvpipe.def").read_text() == made, "run `python .ci/image.py apptainer`"
    for stage in image.parse(DOCKERFILE)[1]:
        for each in stage.instructions:
            if each.word == "RUN":
                assert image.mounts(each.rest)[1].removeprefix("\\\n").lstrip() in made


def test_lines_are_joined_and_comments_left_out(image: Any) -> None:
    text = "ARG A=1\nFROM python:3.${A}-slim-x AS one\n# no\n"
    text += "RUN --mount=type=cache,target=/c \\\n  a \\\n# no\n  && b\n"
    first, (stage,) = image.parse(text + 'ENV X=1 \\\n Y="2 3"\n')
    assert first == {"A": "1"}
    assert stage.name == "one"
    run, env = stage.instructions
    assert (run.word, run.number) == ("RUN", 4)
    assert image.mounts(run.rest.replace("\\\n", "")) == (["/c"], "a   && b")
    assert image.pairs(env.rest) == {"X": "1", "Y": "2 3"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("FROM a\nHEALTHCHECK NONE\n", "Dockerfile:2: image.py does not know HEALTHCHECK"),
        ("FROM a\nONBUILD RUN b\n", "does not know ONBUILD"),
        ("RUN a\nFROM b\n", "Dockerfile:1: only ARG may precede FROM. Received: RUN"),
        ("FROM --platform=x a\n", "FROM should be FROM image"),
        ("FROM a\nRUN b \\\n", "the last instruction does not end"),
    ],
)
def test_what_is_refused(text: str, says: str, image: Any) -> None:
    with pytest.raises(image.ImageError, match=re.escape(says)):
        image.parse(text)


def test_what_a_build_refuses(image: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(image.ImageError, match="no ARG MPL"):
        image.Builder(tmp_path, {"MPL": "ucx"}).build(DOCKERFILE)
    with pytest.raises(
        image.ImageError, match=r"FROM should be python:3\.X-slim-RELEASE\. Received: debian:12"
    ):
        image.Builder(tmp_path, {}).build("FROM debian:12\n")
    monkeypatch.setattr(image.Builder, "_layer", lambda *_: "layer")
    base = "FROM python:3.12-slim-bookworm\n"
    for line, says in (
        ("ENV A\n", "ENV should have NAME=VALUE. Received: A"),
        ("COPY --chown=a b c\n", "Received: --chown=a b c"),
        ("COPY --from=none a b\n", "should name an earlier stage. Received: none"),
        ("RUN --network=none a\n", "Received: --network=none"),
    ):
        with pytest.raises(image.ImageError, match=re.escape(says)):
            image.Builder(tmp_path, {}).build(base + line)


def test_a_layer_is_made_once(image: Any, tmp_path: Path) -> None:
    builder, made = image.Builder(tmp_path, {}), []
    names = [builder._layer(key, lambda layer: made.append(layer.name)) for key in ("a", "b", "a")]
    assert names[0] == names[2] != names[1]
    assert made == [f"{name}.making" for name in names[:2]]

    def fail(layer: Path) -> None:
        (layer / "half").touch()
        raise image.ImageError("no")

    with pytest.raises(image.ImageError):
        builder._layer("c", fail)
    assert len([each for each in (tmp_path / "layers").iterdir() if not each.name.endswith(".making")]) == 2


def test_the_context_leaves_out_what_dockerignore_names(image: Any, tmp_path: Path) -> None:
    for file in (
        "a/x.py",
        "a/__pycache__/x.pyc",
        ".git/config",
        "hvpipe/_build_info.py",
        "b/_build_info.py",
        "b/e.so",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / ".dockerignore").write_text((ROOT / ".dockerignore").read_text())
    found = {str(file.relative_to(tmp_path)) for file in image.context_files(tmp_path, ".")}
    assert found == {".dockerignore", "a/x.py", "b/_build_info.py"}
