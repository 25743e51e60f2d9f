"""Builds the pages as a web site, into a folder of their version: FOLDER/0.2.0 where HEAD has the tag v0.2.0, else FOLDER/main.

    python build.py FOLDER

FOLDER keeps the versions that it has, and FOLDER/index.html lists them. Any web server can serve it; pages load nothing from
elsewhere. A link that leads nowhere, and a page that CONTENTS lacks, fail the build. Needs git, and requirements.txt in this
Python.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REPOSITORY = "https://github.com/switchyard-moe/switchyard"
FRONT = "README.md"

CONTENTS = {
    "Begin": ["requirements", "launchers", "containers", "hosts", "../bindings/python/README", "go-workers", "glossary"],
    "Use": [
        "layers", "inference-servers", "recipes", "ownership", "p2p", "own-kernels", "deep-ep", "deep-ep-hosts",
        "../bindings/python/deep_ep/README",
    ],
    "Operate": ["operations", "observability", "troubleshooting", "environment", "upgrading"],
    "Measure": ["measuring", "figures", "measured/*"],
    "Change it": [
        "../CONTRIBUTING", "../ARCHITECTURE", "testing", "promises", "extending", "adding-a-kernel-family", "adding-a-rail",
    ],
    "Project": ["../CHANGELOG", "../SECURITY"],
}

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
# Files of the repository, on pages that are also read elsewhere.
PUBLISHED = re.compile(re.escape(REPOSITORY) + r"/(?:blob|tree)/main/")


def git(*command: str) -> list[str]:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def version() -> tuple[str, str]:
    """The name of this version's folder, and what GitHub calls the version."""
    text = (ROOT / "switchyard.go").read_text()
    number = re.search(r'^const Version = "(.+)"', text, re.MULTILINE)
    if number and f"v{number[1]}" in git("tag", "--points-at", "HEAD"):
        return number[1], f"v{number[1]}"
    return "main", "main"


def contents() -> str:
    """The toctrees that end the front page."""
    trees = []
    for caption, names in CONTENTS.items():
        entries = [posixpath.normpath(posixpath.join("docs", name)) for name in names]
        options = [f":caption: {caption}", ":hidden:", ":glob:"]
        trees.append("\n".join(["```{toctree}", *options, "", *entries, "```"]))
    return "\n\n" + "\n\n".join(trees) + "\n"


def copy(page: str, pages: list[str], tree: str, to: Path) -> None:
    """Copies a page and its pictures. Links to other files of the repository lead to where that shows them."""

    def lead(link: re.Match[str]) -> str:
        url = link[1]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), url))
        if published := PUBLISHED.match(url):
            target = url[published.end() :]
        elif "://" in url:
            return url
        file = ROOT / target
        if target in pages:
            return posixpath.relpath("index.md" if target == FRONT else target, posixpath.dirname(page) or ".")
        if file.suffix in (".png", ".svg"):
            (to / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to / target)
            return url
        if not file.exists():
            sys.exit(f"site: {page} links to {url}, which is not there")
        return f"{REPOSITORY}/{'tree' if file.is_dir() else 'blob'}/{tree}/{target}"

    text = (ROOT / page).read_text()
    parts, at = [], 0
    for code in FENCE.finditer(text):
        parts += [LINK.sub(lead, text[at : code.start()]), code[0]]
        at = code.end()
    parts.append(LINK.sub(lead, text[at:]))
    if page == FRONT:
        parts.append(contents())
    new = to / ("index.md" if page == FRONT else page)
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_text("".join(parts))


def newest_first(name: str) -> list[int]:
    """Sorts names of versions: main, then releases by their numbers."""
    return [1] if name == "main" else [0, *(int(n) for n in re.findall(r"\d+", name))]


def list_versions(site: Path) -> None:
    names = sorted((f.name for f in site.iterdir() if (f / "index.html").exists()), key=newest_first, reverse=True)
    items = "\n".join(f'<li><a href="{n}/index.html">{n}{", not yet released" if n == "main" else ""}</a></li>' for n in names)
    (site / "index.html").write_text(f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Switchyard: versions of the pages</title>
<body style="font-family: sans-serif; margin: 2rem">
<h1>Switchyard</h1>
<p>The pages of each version:</p>
<ul>
{items}
</ul>
</html>
""")


def render(source: Path, built: Path, name: str) -> None:
    """Makes a folder of HTML from a folder of pages. Every warning is an error."""
    sphinx = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    folders = ["-c", HERE, "-d", source / ".doctrees", source, built]
    if subprocess.run([*sphinx, *folders], env={**os.environ, "SITE_RELEASE": name}).returncode:
        sys.exit("site: a page is not as it should be")
    (built / ".buildinfo").unlink()


def build(site: Path) -> Path:
    """Builds the version that is checked out, and returns its folder."""
    name, tree = version()
    pages = git("ls-files", "*.md")
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "source", Path(folder) / "built"
        for page in pages:
            copy(page, pages, tree, source)
        render(source, built, name)
        shutil.rmtree(site / name, ignore_errors=True)
        shutil.copytree(built, site / name)
    list_versions(site)
    return site / name


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(f"site: the pages are in {build(Path(sys.argv[1]).resolve())}")


if __name__ == "__main__":
    main()
