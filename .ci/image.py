"""Build the Dockerfile's file system without a container daemon, and write it as an Apptainer definition.

    python .ci/image.py build FOLDER [NAME=VALUE...]   build arguments, as docker build --build-arg takes them
    python .ci/image.py apptainer                      write hvpipe.def

`build` needs root, debootstrap and overlayfs. As docker does, it keeps a layer for each instruction, in
FOLDER/layers, and runs again only what has changed. It knows the instructions that the Dockerfile uses, and
refuses others. One thing is not docker's: debootstrap stands in for python:X-slim-bookworm, with Debian's own
Python.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# python3-dev: for the headers that python:X has, too.
BASE_PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"
# What a build needs of this machine: names and certificates.
OF_THIS_MACHINE = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", "/usr/share/ca-certificates")
OF_THIS_MACHINE += ("/usr/local/share/ca-certificates",)
RUN_LIMIT_S = 1800


class ImageError(Exception):
    """The Dockerfile or this machine is not what is wanted."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, with its continuation lines joined. `number` is its line."""

    word: str
    rest: str
    number: int


@dataclass
class Stage:
    """A FROM and what follows. `base` is unexpanded."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Image:
    """A stage as built: its layers, lowest first, and what its configuration says."""

    layers: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    command: list[str] = field(default_factory=list)


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """Return the arguments before the first FROM, and the stages."""
    first: dict[str, str] = {}
    stages: list[Stage] = []
    for each in _instructions(text):
        if each.word == "FROM":
            words = each.rest.split()
            if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
                wanted = f"Dockerfile:{each.number}: FROM should be FROM image [AS name]"
                raise ImageError(f"{wanted}. Received: {each.rest}")
            stages.append(Stage(words[0], words[2] if len(words) == 3 else str(len(stages))))
        elif stages:
            if each.word not in ("ARG", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD"):
                raise ImageError(f"Dockerfile:{each.number}: image.py does not know {each.word}")
            stages[-1].instructions.append(each)
        elif each.word == "ARG":
            name, _, value = each.rest.partition("=")
            first[name] = value
        else:
            raise ImageError(f"Dockerfile:{each.number}: only ARG may precede FROM. Received: {each.word}")
    return first, stages


def _instructions(text: str) -> Iterator[Instruction]:
    pending, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or pending):
            continue
        begun = begun or number
        pending += line
        if pending.endswith("\\"):
            pending += "\n"  # the shell of RUN joins the lines
            continue
        word, _, rest = pending.strip().partition(" ")
        rest = rest.strip()
        yield Instruction(word, rest if word == "RUN" else rest.replace("\\\n", ""), begun)
        pending, begun = "", 0
    if pending:
        raise ImageError(f"Dockerfile:{begun}: the last instruction does not end")


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Replace $NAME and ${NAME}, as docker does in FROM, COPY, ENV, USER and WORKDIR."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], ""), text)


def pairs(rest: str) -> dict[str, str]:
    """Return NAME=VALUE pairs of ENV."""
    found = dict(word.partition("=")[::2] for word in shlex.split(rest))
    if not all("=" in word for word in shlex.split(rest)):
        raise ImageError(f"ENV should have NAME=VALUE. Received: {rest}")
    return found


def mounts(rest: str) -> tuple[list[str], str]:
    """Split RUN's --mount=type=cache,target=FOLDER from the command; return the folders and the command."""
    folders = []
    while match := re.match(r"--(\S+)\s+", rest):
        cache = re.fullmatch(r"mount=type=cache,target=(\S+)", match[1])
        if cache is None:
            raise ImageError(f"RUN may have --mount=type=cache,target=FOLDER. Received: --{match[1]}")
        folders.append(cache[1])
        rest = rest[match.end() :]
    return folders, rest


class Builder:
    """Builds stages in a folder, layer by layer."""

    def __init__(self, folder: Path, arguments: Mapping[str, str]) -> None:
        self._folder, self._arguments = folder, arguments
        self._layers = folder / "layers"
        self._layers.mkdir(parents=True, exist_ok=True)
        self._images: dict[str, Image] = {}

    def build(self, text: str) -> Image:
        """Build all stages, and return the last one."""
        first, stages = parse(text)
        said = [each for stage in stages for each in stage.instructions if each.word == "ARG"]
        unknown = set(self._arguments) - set(first) - {each.rest.partition("=")[0] for each in said}
        if unknown:
            raise ImageError(f"the Dockerfile has no ARG {', '.join(sorted(unknown))}")
        for stage in stages:
            base = expanded(stage.base, {**first, **self._arguments})
            image = Image([self._base(base)])
            values: dict[str, str] = {}
            for each in stage.instructions:
                self._do(each, image, values)
            self._images[stage.name] = image
        return image

    def _base(self, name: str) -> str:
        found = re.fullmatch(r"python:3\.\d+-slim-(\w+)", name)
        if found is None:
            raise ImageError(f"FROM should be python:3.X-slim-RELEASE. Received: {name}")
        suite = found[1]

        def make(layer: Path) -> None:
            options = ["--variant=minbase", f"--include={BASE_PACKAGES}"]
            sources = sources_of(suite)
            command = ["debootstrap", *options, suite, str(layer), sources[suite]]
            print(f"==> {name}: debootstrap {suite} stands in for it, with Debian's Python", flush=True)
            _run(command, self._folder / "debootstrap.log")
            for cache in ("var/cache/apt", "var/lib/apt/lists"):
                shutil.rmtree(layer / cache, ignore_errors=True)
                (layer / cache).mkdir(parents=True)
            lines = (f"deb {place} {name} main\n" for name, place in sources.items())
            (layer / "etc/apt/sources.list").write_text("".join(lines))

        return self._layer(f"{suite} {BASE_PACKAGES}", make)

    def _do(self, each: Instruction, image: Image, values: dict[str, str]) -> None:
        rest = expanded(each.rest, {**values, **image.environ})
        if each.word == "ARG":
            name, _, default = rest.partition("=")
            values[name] = self._arguments.get(name, default)
        elif each.word == "ENV":
            image.environ |= pairs(rest)
        elif each.word == "USER":
            image.user = rest
        elif each.word == "WORKDIR":
            image.folder = rest
        elif each.word == "CMD":
            image.command = json.loads(rest)
        elif each.word == "RUN":
            self._run_in(each, image, values)
        else:
            self._copy(rest, image)

    def _run_in(self, each: Instruction, image: Image, values: Mapping[str, str]) -> None:
        caches, command = mounts(each.rest)
        used = {**values, **image.environ}
        key = json.dumps([image.layers, image.user, command, sorted(used.items())])

        def make(layer: Path) -> None:
            print(f"==> Dockerfile:{each.number}: {' '.join(command.split())[:90]}", flush=True)
            with mounted(self._folder, image.layers, layer) as root, _for_build(root, self._folder, caches):
                environ = {"HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **used}
                environ.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
                environ["PATH"] += ":/usr/sbin:/sbin"
                # In processes of their own, which end with a build that is interrupted.
                apart = ["unshare", "--pid", "--fork", "--kill-child", "chroot", str(root)]
                _run([*apart, "/bin/sh", "-c", command], self._folder / "run.log", environ)

        image.layers = [*image.layers, self._layer(key, make)]

    def _copy(self, rest: str, image: Image) -> None:
        words = rest.split()
        source = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else ""
        if len(words) != 2 or any(word.startswith("--") for word in words):
            raise ImageError(f"COPY should be COPY [--from=STAGE] FROM TO. Received: {rest}")
        path, target = words
        if source:
            if source not in self._images:
                raise ImageError(f"COPY --from should name an earlier stage. Received: {source}")
            content = json.dumps(self._images[source].layers)
        else:
            content = _sum_of(ROOT, path)

        def make(layer: Path) -> None:
            print(f"==> COPY {rest}", flush=True)
            to = layer / target.lstrip("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            if source:
                with mounted(self._folder, self._images[source].layers) as root:
                    _run(["cp", "-a", str(root / path.lstrip("/")), str(to)], self._folder / "run.log")
                return
            for file in context_files(ROOT, path):
                inside = to if (ROOT / path).is_file() else to / file.relative_to(ROOT / path)
                inside.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, inside)

        image.layers = [*image.layers, self._layer(json.dumps([image.layers, rest, content]), make)]

    def _layer(self, key: str, make: object) -> str:
        """Return the name of the layer with this key. Make the layer if it is missing."""
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        if not (self._layers / name).exists():
            making = self._layers / f"{name}.making"
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            make(making)  # type: ignore[operator]
            making.rename(self._layers / name)
        return name


def sources_of(suite: str) -> dict[str, str]:
    """Return where this machine's apt has a suite, its updates and its security updates."""
    asked = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = (suite, f"{suite}-updates", f"{suite}-security")
    found = {name: place for name, _, place in (line.partition(" ") for line in told) if name in wanted}
    if suite not in found:
        raise ImageError(f"this machine's apt should have Debian's {suite}. Received: {sorted(set(told))}")
    return found


def context_files(root: Path, path: str) -> Iterator[Path]:
    """Yield the files of the build's context below `path`, without those that .dockerignore names."""
    patterns = [line for line in (root / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]

    def is_ignored(inside: str) -> bool:
        name = inside.rpartition("/")[2]
        anywhere = [each[3:] for each in patterns if each.startswith("**/")]
        return inside in patterns or any(fnmatch.fnmatch(name, each) for each in anywhere)

    if (root / path).is_file():
        yield root / path
        return
    for folder, folders, files in os.walk(root / path):
        at = Path(folder)
        folders[:] = sorted(each for each in folders if not is_ignored(str((at / each).relative_to(root))))
        yield from (at / each for each in sorted(files) if not is_ignored(str((at / each).relative_to(root))))


def _sum_of(root: Path, path: str) -> str:
    digest = hashlib.sha256()
    for file in context_files(root, path):
        digest.update(f"{file.relative_to(root)}\0{os.access(file, os.X_OK)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def mounted(folder: Path, layers: list[str], upper: Path | None = None) -> Iterator[Path]:
    """Mount layers over each other, with a layer that takes what is written, and unmount them afterwards."""
    root, work = folder / f"root.{os.getpid()}.{len(layers)}", folder / f"work.{os.getpid()}"
    upper = upper or folder / f"upper.{os.getpid()}"
    for each in (root, work, upper):
        each.mkdir(exist_ok=True)
    lower = ":".join(f"layers/{name}" for name in reversed(layers))  # options have 4096 characters at most
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], cwd=folder, check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", "-R", "-l", str(root)], check=True)
        root.rmdir()
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(folder / f"upper.{os.getpid()}", ignore_errors=True)


@contextlib.contextmanager
def _for_build(root: Path, folder: Path, caches: list[str]) -> Iterator[None]:
    """Mount what a build needs: /proc, /dev, this machine's names and certificates, and caches."""
    binds = [(path, path) for path in OF_THIS_MACHINE if Path(path).exists()]
    binds += [("/dev", "/dev"), ("/proc", "/proc")]
    for target in caches:
        cache = folder / "cache" / target.strip("/").replace("/", "-")
        cache.mkdir(parents=True, exist_ok=True)
        binds.append((str(cache), target))
    made = []
    for source, target in binds:
        at = root / target.lstrip("/")
        if not at.exists():
            made.append(at)
            at.parent.mkdir(parents=True, exist_ok=True)
            at.mkdir() if Path(source).is_dir() else at.touch()
        subprocess.run(["mount", "--bind", source, str(at)], check=True)
    try:
        yield
    finally:
        for _, target in reversed(binds):
            subprocess.run(["umount", "-l", str(root / target.lstrip("/"))], check=True)
        for at in made:
            at.rmdir() if at.is_dir() else at.unlink()


def _run(command: list[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
    """Run a command; show its output only if it fails."""
    with log.open("w") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, **streams, env=environ, timeout=RUN_LIMIT_S)
    if done.returncode != 0:
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-60:]), file=sys.stderr)
        raise ImageError(f"exit code {done.returncode} of: {shlex.join(command)[:200]}")


def apptainer(text: str) -> str:
    """Return the Dockerfile as an Apptainer definition: the same commands, in two stages."""
    first, stages = parse(text)
    lines = ["# Made from the Dockerfile by .ci/image.py. Build: apptainer build hvpipe.sif hvpipe.def", ""]
    for number, stage in enumerate(stages):
        base, values = expanded(stage.base, first), []
        files, others, post, environ, run = [], [], [], [], ['    exec "$@"']
        for each in stage.instructions:
            if each.word == "ARG":
                name, _, default = each.rest.partition("=")
                values.append(f"    {name}={default}")
                post.append(f"    export {name}={{{{ {name} }}}}")
            elif each.word == "ENV":
                named = pairs(each.rest)
                exports = [f"    export {name}={shlex.quote(value)}" for name, value in named.items()]
                post += exports
                environ += exports
            elif each.word == "RUN":
                post.append("    " + mounts(each.rest)[1].removeprefix("\\\n").lstrip())
            elif each.word == "COPY" and each.rest.startswith("--from="):
                source, path, target = each.rest.split()
                others += [f"%files from {source.removeprefix('--from=')}", f"    {path} {target}", ""]
            elif each.word == "COPY":
                files.append("    {} {}".format(*each.rest.split()))
            elif each.word == "CMD":
                run.insert(0, f"    [ $# -gt 0 ] || set -- {shlex.join(json.loads(each.rest))}")
        last = number == len(stages) - 1
        lines += ["Bootstrap: docker", f"From: {base}", f"Stage: {'final' if last else stage.name}", ""]
        lines += ["%arguments", *values, ""] if values else []
        lines += ["%files", *files, ""] if files else []
        lines += [*others, "%post", "    set -e", *post, ""]
        if last:
            lines += ["%environment", *environ, "", "%runscript", *run, ""]
    return "\n".join(lines)


def main(words: list[str]) -> int:
    text = (ROOT / "Dockerfile").read_text()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is mounted is unmounted
    try:
        if words == ["apptainer"]:
            (ROOT / "hvpipe.def").write_text(apptainer(text))
            return 0
        if len(words) < 2 or words[0] != "build" or not all("=" in word for word in words[2:]):
            wanted = "build FOLDER [NAME=VALUE...], or apptainer"
            raise ImageError(f"wanted: {wanted}. Received: {shlex.join(words)}")
        folder = Path(words[1]).resolve()
        image = Builder(folder, dict(word.split("=", 1) for word in words[2:])).build(text)
        (folder / "image.json").write_text(json.dumps(vars(image), indent=2))
        return 0
    except ImageError as error:
        print(f"image.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
