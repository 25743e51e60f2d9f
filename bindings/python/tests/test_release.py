"""The script that builds a release, without its compilers."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("release", HERE / "release.py")
assert spec
assert spec.loader
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)

NOTES = "### New\n\n- A thing.\n\n### Mended\n\n- Another."


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of version 1.2.0, whose tag names HEAD."""
    root = tmp_path / "tree"
    (root / "bindings/python/src/switchyard").mkdir(parents=True)
    (root / "switchyard.go").write_text('package switchyard\n\nconst Version = "1.2.0"\n')
    (root / "bindings/python/src/switchyard/_version.py").write_text('__version__ = "1.2.0"\n')
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\nWords.\n\n## 1.2.0\n\n{NOTES}\n\n## 1.1.0\n\n- Old.\n")
    (root / "go.sum").write_text("")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(root, "init", "-q")
    commit(root)
    git(root, "tag", "v1.2.0")
    monkeypatch.setattr(release, "ROOT", root)
    return root


def git(root: Path, *words: str) -> str:
    options = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    done = subprocess.run(["git", *options, *words], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "c")


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_the_commit_of_the_tag_is_released(tree: Path):
    assert release.version(tree, False) == "1.2.0"
    release.check_tag("1.2.0")


def test_versions_that_disagree_are_refused(tree: Path):
    change(tree / "bindings/python/src/switchyard/_version.py", "1.2.0", "1.3.0")
    for trial in (False, True):
        with pytest.raises(SystemExit, match=r"switchyard.go has version 1.2.0, _version.py has 1.3.0"):
            release.version(tree, trial)


def test_a_changelog_of_another_version_is_refused(tree: Path):
    change(tree / "CHANGELOG.md", "## 1.2.0", "## 1.4.0")
    with pytest.raises(SystemExit, match=r"CHANGELOG.md begins with 1.4.0, switchyard.go has version 1.2.0"):
        release.version(tree, True)


def test_what_the_changelog_says_is_not_released_can_only_be_tried(tree: Path):
    change(tree / "CHANGELOG.md", "## 1.2.0", "## 1.2.0 (not yet released)")
    assert release.version(tree, True) == "1.2.0"
    with pytest.raises(SystemExit, match=r"says '1.2.0 \(not yet released\)': a release has the heading '1.2.0'"):
        release.version(tree, False)


@pytest.mark.parametrize("name", ["switchyard.go", "stray"])
def test_a_checkout_with_changes_is_refused(tree: Path, name: str):
    with open(tree / name, "a") as file:
        file.write("// changed\n")
    with pytest.raises(SystemExit, match=r"changes that are not committed: a release is a commit"):
        release.check_tag("1.2.0")


def test_a_commit_without_the_tag_is_refused(tree: Path):
    git(tree, "tag", "-d", "v1.2.0")
    git(tree, "tag", "other")
    with pytest.raises(SystemExit, match=re.escape("HEAD has the tags ['other'], not v1.2.0: git tag -s v1.2.0")):
        release.check_tag("1.2.0")


def test_a_tag_of_another_commit_is_refused(tree: Path):
    was = git(tree, "rev-parse", "--short", "HEAD")
    (tree / "more").touch()
    commit(tree)
    now = git(tree, "rev-parse", "--short", "HEAD")
    with pytest.raises(SystemExit, match=f"v1.2.0 is commit {was} already, HEAD is {now}: a version is released once"):
        release.check_tag("1.2.0")
    git(tree, "tag", "-f", "-a", "-m", "m", "v1.2.0", was)  # an object of its own that names a commit
    with pytest.raises(SystemExit, match=f"v1.2.0 is commit {was} already, HEAD is {now}"):
        release.check_tag("1.2.0")


def test_notes_are_the_part_of_the_changelog_about_this_version(tree: Path):
    assert release.notes(tree) == NOTES + "\n"
    change(tree / "CHANGELOG.md", "\n## 1.1.0\n\n- Old.\n", "")
    assert release.notes(tree) == NOTES + "\n", "of the first version too"


def archive(path: Path, names: list[str], mtime: int, owner: str) -> None:
    with tarfile.open(path, "w:gz") as packed:
        for name in names:
            member = tarfile.TarInfo(name)
            data = b"" if name == "d" else name.encode()
            member.type = tarfile.DIRTYPE if name == "d" else tarfile.REGTYPE
            member.size, member.mtime, member.uname, member.uid = len(data), mtime, owner, mtime % 1000
            member.mode = {"d": 0o775, "d/run": 0o775}.get(name, 0o664 if mtime % 2 else 0o600)
            packed.addfile(member, io.BytesIO(data))


def test_archives_of_two_builds_are_the_same(tmp_path: Path):
    one, two = tmp_path / "one.tar.gz", tmp_path / "two.tar.gz"
    archive(one, ["d", "d/a", "d/run"], 1001, "ann")
    archive(two, ["d/run", "d/a", "d"], 2002, "bob")
    assert one.read_bytes() != two.read_bytes()
    for path in (one, two):
        release.plain(path, 77)
    assert one.read_bytes() == two.read_bytes()
    with tarfile.open(one) as packed:
        assert packed.getnames() == ["d", "d/a", "d/run"]
        assert [m.mode for m in packed.getmembers()] == [0o755, 0o644, 0o755]
        assert {m.mtime for m in packed.getmembers()} == {77}
        inside = packed.extractfile("d/a")
        assert inside
        assert inside.read() == b"d/a"


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has builds write names of files into files, followed by what is in the list. git is itself."""
    real, extra = release.run, [""]

    def run(*command: object, at: Path, **env: str) -> str:
        words = [str(word) for word in command]
        if words[0] == "git":
            return real(*command, at=at, **env)
        if words[:2] == ["go", "build"]:
            out = Path(words[words.index("-o") + 1])
        elif "--sdist" in words:
            out = Path(words[words.index("--outdir") + 1]) / "switchyard_moe-1.2.0.tar.gz"
            return archive(out, ["d", "d/run"], 1, "ann") or ""
        elif "--wheel" in words:
            out = Path(words[words.index("--outdir") + 1]) / f"switchyard_moe-1.2.0-{env['GOARCH']}.whl"
        else:
            return {"list": "example.org/M v1.0.0", "env": "go1.26.8"}[words[1]]
        out.write_text(out.name + extra[-1])
        return ""

    monkeypatch.setattr(release, "run", run)
    return extra


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["release.py", *(str(word) for word in arguments)])
    release.main()


FILES = [
    "NOTES.md",
    "perf-1.2.0-linux-amd64",
    "perf-1.2.0-linux-arm64",
    "switchyard-1.2.0-linux-amd64",
    "switchyard-1.2.0-linux-arm64",
    "switchyard-1.2.0.cdx.json",
    "switchyard_moe-1.2.0-amd64.whl",
    "switchyard_moe-1.2.0-arm64.whl",
    "switchyard_moe-1.2.0.tar.gz",
]


def test_checksums_name_every_file(tree: Path, compilers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tree / "go.sum").write_text("example.org/M v1.0.0 h1:abc=\n")
    commit(tree)
    git(tree, "tag", "-f", "v1.2.0")
    out = tmp_path / "dist"
    out.mkdir()
    (out / "left").write_text("from an earlier release")
    call(monkeypatch, out, "--twice")
    assert sorted(f.name for f in out.iterdir()) == sorted([*FILES, "SHA256SUMS"])
    lines = (out / "SHA256SUMS").read_text().splitlines()
    assert lines == [f"{hashlib.sha256((out / name).read_bytes()).hexdigest()}  {name}" for name in FILES]
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=out, check=True)
    assert (out / "NOTES.md").read_text() == NOTES + "\n"
    assert not out.with_name("dist-again").exists()


def test_a_byte_that_differs_is_told(tree: Path, compilers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tree / "go.sum").write_text("example.org/M v1.0.0 h1:abc=\n")
    commit(tree)
    build = release.make

    def make(*arguments: object) -> None:
        build(*arguments)
        compilers.append(compilers[-1] + "!")

    monkeypatch.setattr(release, "make", make)
    with pytest.raises(SystemExit, match=r"release: \[.*'switchyard-1.2.0-linux-amd64'.*\] differ between two builds of "):
        call(monkeypatch, tmp_path / "dist", "--trial", "--twice")


def test_a_refused_release_leaves_what_is_there(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tree / "stray").touch()
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/old").touch()
    with pytest.raises(SystemExit, match="not committed"):
        call(monkeypatch, tmp_path / "dist")
    assert (tmp_path / "dist/old").exists()


@pytest.mark.skipif(not shutil.which("go"), reason="needs the go command")
def test_the_bill_of_materials_follows_its_schema():
    pytest.importorskip("cyclonedx")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from packageurl import PackageURL

    text = release.sbom(HERE.parents[1], "1.2.0", "c0ffee")
    check = JsonStrictValidator(SchemaVersion.V1_6)
    assert check.validate_str(text) is None
    assert check.validate_str(text.replace('"library"', '"book"')) is not None, "the check finds a wrong word"
    document = json.loads(text)
    whole = [document["metadata"]["component"], *document["components"]]
    for part in whole:
        assert PackageURL.from_string(part["purl"]).to_string() == part["purl"]
    names = [part["name"] for part in whole]
    assert {"switchyard", "std", "golang.org/x/sys", "github.com/cespare/xxhash/v2"} <= set(names)
    assert "github.com/stretchr/testify" not in names, "which only tests need"
    assert len(set(names)) == len(names)
    assert release.sbom(HERE.parents[1], "1.2.0", "c0ffee") == text
    assert release.sbom(HERE.parents[1], "1.2.0", "decaf") != text


def test_files_name_no_folder_of_their_build(tmp_path: Path) -> None:
    (tmp_path / "command").write_bytes(b"\x7fELF /usr/lib")
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("lib.so", b"x" * 1000 + b"/tmp/there/include" + b"x" * 1000)
    release.check_places(tmp_path, ["/tmp/here"])
    with pytest.raises(SystemExit, match=r"a\.whl lib\.so names /tmp/there, where it was built"):
        release.check_places(tmp_path, ["/tmp/there"])
    with pytest.raises(SystemExit, match="command names /usr/lib"):
        release.check_places(tmp_path, ["/usr/lib"])
