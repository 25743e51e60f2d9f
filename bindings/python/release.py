"""Builds the files of a release from one commit: wheels, sdist, the command, the benchmark, an SBOM, notes and checksums.

    python release.py FOLDER             the commit that the tag of the version names, from a clean checkout
    python release.py FOLDER --trial     HEAD as it is committed, whatever its tag; nothing to publish
    python release.py FOLDER --twice     builds it twice in different folders with caches of their own, and compares every byte

Needs git and Go, and requirements-release.txt in this Python. zig, which is there, is the C compiler for both machines.
"""

from __future__ import annotations

import argparse
import filecmp
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # what Go and compilers call them
GLIBC = "2.28"  # the oldest that files run on, as for wheels
LIBRARY = "./bindings/python/abi"
# By the names that their files begin with. Doctor and the benchmark call the GPUs' driver, so both need cgo. They are built
# without NVML, whose package asks for a flag that zig's linker lacks.
COMMANDS = {"switchyard": "./cmd/switchyard", "perf": "./test/perf"}


def run(*command: object, at: Path, **env: str) -> str:
    """Runs a command and returns what it prints."""
    words = [str(c) for c in command]
    done = subprocess.run(words, cwd=at, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"release: {' '.join(words)} failed")
    return done.stdout.strip()


def match(file: Path, pattern: str, what: str) -> str:
    found = re.search(pattern, file.read_text(), re.MULTILINE)
    if not found:
        sys.exit(f"release: {file.name} does not have {what}")
    return found[1]


def version(tree: Path, trial: bool) -> str:
    """The version of the tree, if all places agree on it and the changelog says that it is released."""
    go = match(tree / "switchyard.go", r'^const Version = "(.+)"', "the version")
    python = match(tree / "bindings/python/src/switchyard/_version.py", r'^__version__ = "(.+)"', "the version")
    heading = match(tree / "CHANGELOG.md", r"^## (.+)", "a heading")
    if go != python:
        sys.exit(f"release: switchyard.go has version {go}, _version.py has {python}: they are released together")
    if heading.split()[0] != go:
        sys.exit(f"release: CHANGELOG.md begins with {heading}, switchyard.go has version {go}")
    if not trial and heading != go:
        sys.exit(f"release: CHANGELOG.md says {heading!r}: a release has the heading {go!r}")
    return go


def notes(tree: Path) -> str:
    """The part of the changelog that is about this version."""
    parts = re.split(r"^## .*\n", (tree / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return parts[1].strip() + "\n"


def check_tag(release: str) -> None:
    """A release is what its tag names."""
    if run("git", "status", "--porcelain", at=ROOT):
        sys.exit("release: the checkout has changes that are not committed: a release is a commit")
    tag = f"v{release}"
    tags = run("git", "tag", "--points-at", "HEAD", at=ROOT).split()
    if tag not in tags and tag in run("git", "tag", "--list", tag, at=ROOT).split():
        named, head = (run("git", "rev-parse", "--short", of, at=ROOT) for of in (f"{tag}^{{commit}}", "HEAD"))
        cure = "a version is released once: check that commit out, or raise the version"
        sys.exit(f"release: {tag} is commit {named} already, HEAD is {head}: {cure}")
    if tag not in tags:
        sys.exit(f"release: HEAD has the tags {tags}, not {tag}: git tag -s {tag}")


def plain(sdist: Path, epoch: int) -> None:
    """Write an archive again without what differs from build to build: times, owners, order."""
    with tarfile.open(sdist) as old:
        found = [(m, old.extractfile(m).read() if m.isfile() else b"") for m in old.getmembers()]  # type: ignore[union-attr]
        members = sorted(found, key=lambda pair: pair[0].name)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member, data in members:
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, io.BytesIO(data))
    with open(sdist, "wb") as out, gzip.GzipFile("", "wb", fileobj=out, mtime=epoch) as packed:
        packed.write(raw.getvalue())


def sbom(tree: Path, release: str, commit: str) -> str:
    """The list of what is in the shared library and the commands, as CycloneDX 1.6."""
    form = "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}{{end}}{{end}}"
    modules: dict[str, str] = {}
    for arch in MACHINES:
        for package in (LIBRARY, *COMMANDS.values()):
            for line in run("go", "list", "-deps", "-f", form, package, at=tree, GOARCH=arch, CGO_ENABLED="1").splitlines():
                if line:
                    modules.update([line.split()])
    sums = dict(re.findall(r"^(\S+ v\S+) h1:(\S+)$", (tree / "go.sum").read_text(), re.MULTILINE))
    parts = [
        {
            "type": "library", "name": path, "version": v, "purl": f"pkg:golang/{path.lower()}@{v}",
            "properties": [{"name": "go:sum", "value": f"h1:{sums[f'{path} {v}']}"}],
        }
        for path, v in sorted(modules.items())
    ]  # fmt: skip
    toolchain = run("go", "env", "GOVERSION", at=tree)
    number = toolchain.removeprefix("go")
    parts.append({"type": "library", "name": "std", "version": number, "purl": f"pkg:golang/std@{number}"})
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, commit)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "name": "switchyard", "version": release, "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": f"pkg:golang/github.com/switchyard-moe/switchyard@v{release}",
            }
        },
        "components": parts,
    }  # fmt: skip
    return json.dumps(document, indent=2) + "\n"


def check_places(out: Path, places: list[str]) -> None:
    """No file names a folder in which it was made, since those of another build differ."""
    for file in sorted(out.iterdir()):
        parts = {"": file.read_bytes()}
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as wheel:
                parts = {f" {name}": wheel.read(name) for name in wheel.namelist()}
        for name, data in parts.items():
            for place in places:
                if place.encode() in data:
                    sys.exit(f"release: {file.name}{name} names {place}, where it was built: another build would differ")


def make(out: Path, commit: str, trial: bool) -> None:
    """Build everything from a commit into an empty folder."""
    epoch = int(run("git", "show", "-s", "--format=%ct", commit, at=ROOT))
    with tempfile.TemporaryDirectory() as folder:
        tree, work = Path(folder) / "tree", Path(folder) / "work"
        tree.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as source:
            source.extractall(tree, filter="tar")
        release = version(tree, trial)
        env = {"SOURCE_DATE_EPOCH": str(epoch), "CC": ""}
        package = tree / "bindings/python"
        build = (sys.executable, "-m", "build", "--no-isolation")
        run(*build, "--sdist", "--outdir", out, package, at=tree, **env)
        (sdist,) = out.glob("*.tar.gz")
        plain(sdist, epoch)
        with tarfile.open(sdist) as packed:
            packed.extractall(work, filter="tar")
        (unpacked,) = work.iterdir()
        for arch in MACHINES:
            run(*build, "--wheel", "--outdir", out, unpacked, at=tree, GOARCH=arch, **env)
            shutil.rmtree(unpacked / "build", ignore_errors=True)
            zig = f"{shlex.quote(sys.executable)} -m ziglang cc -target {MACHINES[arch]}-linux-gnu.{GLIBC}"
            link = "-ldflags=-s -w -buildid= -extldflags=-Wl,-s"
            flags = ["-trimpath", "-buildvcs=false", "-tags=netgo,osusergo,nonvml", link]
            for name, package in COMMANDS.items():
                program = out / f"{name}-{release}-linux-{arch}"
                run("go", "build", *flags, "-o", program, package, at=tree, CGO_ENABLED="1", GOARCH=arch, CC=zig)
        check_places(out, [folder, *([sys.prefix] if sys.prefix != sys.base_prefix else [])])
        (out / f"switchyard-{release}.cdx.json").write_text(sbom(tree, release, commit))
        (out / "NOTES.md").write_text(notes(tree))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--twice", action="store_true")
    chosen = parser.parse_args()
    os.umask(0o022)  # a wheel has the modes of its files
    if not chosen.trial:
        check_tag(version(ROOT, False))
    commit = run("git", "rev-parse", "HEAD", at=ROOT)
    folders = [chosen.folder.resolve()]
    if chosen.twice:
        folders.append(folders[0].with_name(folders[0].name + "-again"))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as caches:
            if folder != folders[0]:  # objects of the first build would be taken again
                os.environ.update(GOCACHE=f"{caches}/go", ZIG_GLOBAL_CACHE_DIR=f"{caches}/zig")
            make(folder, commit, chosen.trial)
    names = sorted(file.name for file in folders[0].iterdir())
    for name in names:
        print(f"{(folders[0] / name).stat().st_size:>10}  {name}")
    if chosen.twice:
        same, other, missing = filecmp.cmpfiles(*folders, names, shallow=False)
        if other or missing or sorted(file.name for file in folders[1].iterdir()) != names:
            sys.exit(f"release: {other + missing} differ between two builds of {commit}")
        shutil.rmtree(folders[1])
        print(f"{len(same)} files are the same in two builds of {commit}")


if __name__ == "__main__":
    main()
