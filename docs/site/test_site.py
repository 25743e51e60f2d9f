"""Builds the site and looks at it in Chromium, which knows no host but this one. Needs requirements.txt and pytest.

    python -m pytest docs/site
"""

from __future__ import annotations

import functools
import http.server
import json
import queue
import re
import shutil
import subprocess
import threading
from pathlib import Path
from urllib.parse import urlencode

import build
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DARK, LIGHT = 0, 1  # as Chromium numbers them
PROBE = Path(__file__).with_name("probe.html")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for old in ("0.1.0", "0.10.0", "0.9.0"):
        (folder / old).mkdir()
        (folder / old / "index.html").write_text("an earlier version")
    built = build.build(folder)
    shutil.copy(PROBE, folder)
    return built


class Handler(http.server.SimpleHTTPRequestHandler):
    seen: queue.Queue

    def do_POST(self):
        self.seen.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def look(site, tmp_path):
    """Returns what Chromium sees of a page once an element is there."""
    if not CHROMIUM:
        pytest.skip("needs Chromium")
    seen = queue.Queue()
    handler = functools.partial(type("Handler", (Handler,), {"seen": seen}), directory=site.parent)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    started = []

    def look(page, element, scheme=LIGHT):
        address = f"http://127.0.0.1:{server.server_port}"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={tmp_path}"]
        flags += [f"--blink-settings=preferredColorScheme={scheme}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        probe = f"{address}/probe.html?" + urlencode({"page": f"/{site.name}/{page}", "element": element})
        started.append(subprocess.Popen([CHROMIUM, *flags, probe], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        found = seen.get(timeout=120)
        assert found["width"] <= 420, "the page is wider than its window"
        assert [name for name in found["loaded"] if not name.startswith(address)] == []
        assert 0 not in found["pictures"]
        return found

    yield look
    for process in started:
        process.terminate()
        process.wait()
    server.shutdown()
    server.server_close()


def brightness(color):
    return sum(int(n) for n in re.findall(r"\d+", color)[:3])


@pytest.mark.parametrize("scheme", [DARK, LIGHT], ids=["dark", "light"])
def test_front_page(look, scheme):
    found = look("index.html", "img[src$='token.svg']", scheme)
    assert found["title"] == "Switchyard main" or re.fullmatch(r"Switchyard [\d.]+", found["title"])
    assert [h.rstrip("¶") for h in found["headings"][:2]] == ["Switchyard", "Three commands"]
    assert (brightness(found["background"]) < brightness(found["color"])) == (scheme == DARK)
    assert len(found["pictures"]) >= 4


@pytest.mark.parametrize("scheme", [DARK, LIGHT], ids=["dark", "light"])
def test_a_table_scrolls_in_a_narrow_window(look, scheme):
    found = look("docs/launchers.html", "article table", scheme)
    assert "SWITCHYARD_LAUNCHER" in found["text"]
    assert found["scrolls"] == "auto"
    assert (brightness(found["background"]) < brightness(found["color"])) == (scheme == DARK)


@pytest.mark.parametrize("scheme", [DARK, LIGHT], ids=["dark", "light"])
def test_search(look, scheme):
    found = look("search.html?q=credit", "#search-results li a[href*='docs/glossary.html']", scheme)
    assert len(found["results"]) > 1
    assert (brightness(found["background"]) < brightness(found["color"])) == (scheme == DARK)


def test_search_of_what_is_nowhere(look):
    found = look("search.html?q=xylophone", ".search-summary:not(:empty)")
    assert found["results"] == []


# Resources that a page names. Those that scripts load are seen by the browser, above.
def test_nothing_is_loaded_from_elsewhere(site):
    tag = r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//"""
    loads = re.compile(tag + r"""|@import|url\(["']?(?:https?:)?//""")
    files = [f for f in site.rglob("*") if f.suffix in (".html", ".css", ".svg")]
    assert len(files) > 40
    assert [str(f) for f in files if loads.search(f.read_text())] == []


def test_every_page_is_there(site):
    pages = build.git("ls-files", "*.md")
    assert build.FRONT in pages
    for page in pages:
        assert (site / ("index.html" if page == build.FRONT else page.replace(".md", ".html"))).exists()


def test_versions_are_listed_newest_first(site):
    listed = re.findall(r'<a href="(.+?)/index.html">', (site.parent / "index.html").read_text())
    assert [n for n in listed if n != site.name] == ["0.10.0", "0.9.0", "0.1.0"]
    if site.name == "main":
        assert listed[0] == "main"
    assert 'href="../index.html"' in (site / "index.html").read_text()
    assert 'href="../../index.html"' in (site / "docs/glossary.html").read_text()
    assert (site.parent / "0.9.0/index.html").read_text() == "an earlier version"


def test_links(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code/main.go").touch()
    pages = ["README.md", "docs/a.md", "docs/b.md"]
    (tmp_path / "docs/a.md").write_text(
        "[f](../README.md#x) [b](b.md) [o](https://o.org/a.md) [code](../code/main.go) [dir](../code)"
        " [far](https://github.com/switchyard-moe/switchyard/blob/main/docs/b.md)\n```text\n[kept](../code/main.go)\n```\n"
    )
    build.copy("docs/a.md", pages, "v1.2.3", tmp_path / "to")
    assert (tmp_path / "to/docs/a.md").read_text() == (
        "[f](../index.md#x) [b](b.md) [o](https://o.org/a.md)"
        " [code](https://github.com/switchyard-moe/switchyard/blob/v1.2.3/code/main.go)"
        " [dir](https://github.com/switchyard-moe/switchyard/tree/v1.2.3/code) [far](b.md)"
        "\n```text\n[kept](../code/main.go)\n```\n"
    )
    (tmp_path / "docs/b.md").write_text("[gone](../code/gone.go)")
    with pytest.raises(SystemExit, match=r"docs/b.md links to ../code/gone.go, which is not there"):
        build.copy("docs/b.md", pages, "main", tmp_path / "to")


@pytest.mark.parametrize(
    ("front", "other", "says"),
    [
        ("# A\n[b](other.md)\n```{toctree}\nother\n```\n", "# B\n", None),
        ("# A\n```{toctree}\nother\n```\n", "# B\n[x](#nothing)\n", "nothing"),
        ("# A\n[x](other.md#nothing)\n```{toctree}\nother\n```\n", "# B\n", "nothing"),
        ("# A\n", "# B\n", "other.md"),
    ],
    ids=["right", "no heading", "no heading there", "not in the contents"],
)
def test_what_is_wrong_fails_the_build(tmp_path, capfd, front, other, says):
    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text(front)
    (source / "other.md").write_text(other)
    if says is None:
        build.render(source, tmp_path / "built", "main")
        return
    with pytest.raises(SystemExit, match="site: "):
        build.render(source, tmp_path / "built", "main")
    assert says in capfd.readouterr().err
