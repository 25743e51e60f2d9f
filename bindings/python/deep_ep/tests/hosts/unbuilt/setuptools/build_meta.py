"""The name and the version of an sdist, which is all that pip wants to know before it keeps the file."""

from __future__ import annotations

from email.parser import HeaderParser
from pathlib import Path


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    said = HeaderParser().parsestr(Path("PKG-INFO").read_text())
    info = Path(metadata_directory, f"{said['Name']}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {said['Name']}\nVersion: {said['Version']}\n")
    return info.name
