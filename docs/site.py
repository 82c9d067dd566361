"""Hooks of ``mkdocs`` for ``mkdocs.yml``. The site has some pages from outside of ``docs/``, and links to them.
A link to another file of the repository, such as source code, becomes its words."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ADDED = "repository"
"""The folder of the site with the pages from outside of ``docs/``, at their paths in the repository."""
PAGES = [path.name for path in ROOT.glob("*.md")] + ["tests/README.md", "cython_ext/hook/DESIGN.md"]
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for page in PAGES:
        files.append(File.generated(config, f"{ADDED}/{page}", abs_src_path=str(ROOT / page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return LINK.sub(lambda link: relinked(link, page.file.src_uri), markdown)


def relinked(link: re.Match[str], source: str) -> str:
    """``link`` as it is written in the site's page ``source``."""
    words, target = link.groups()
    path, hash_mark, anchor = target.partition("#")
    if not path or ":" in path:
        return link[0]
    folder = posixpath.dirname(in_repository(source))
    page = in_site(posixpath.normpath(posixpath.join(folder, path)))
    if page is None:
        return words
    return f"[{words}]({posixpath.relpath(page, posixpath.dirname(source))}{hash_mark}{anchor})"


def in_repository(source: str) -> str:
    return source.removeprefix(f"{ADDED}/") if source.startswith(f"{ADDED}/") else f"docs/{source}"


def in_site(path: str) -> str | None:
    """The site's page or file of ``path``, a path in the repository; None if the site has none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{ADDED}/{path}" if path in PAGES else None
