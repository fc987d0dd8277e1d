"""Hooks of mkdocs: the repository's files in the site.

Pages link to files by their paths in the repository, so that links work on GitHub.  In the site,
README.md is the first page, and each other file outside of docs/ that a page links to is copied to
repository/, at its own path.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s]+)(?=\))")


def on_config(config: MkDocsConfig) -> None:
    """Name the anchors of headings as GitHub does."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that pages link to, and those that these link to."""
    added = ["README.md", *(path for file in files.documentation_pages() for path in linked(file))]
    while added:
        path = added.pop()
        if files.get_file_from_path(in_site(path)) is None:
            file = File.generated(config, in_site(path), abs_src_path=str(ROOT / path))
            files.append(file)
            added += linked(file)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links to paths in the repository into links to the site's files."""

    def link(match: re.Match[str]) -> str:
        path, hash_, anchor = match[2].partition("#")
        if "://" in path or not path:
            return match[0]
        here = posixpath.dirname(page.file.src_uri)
        target = posixpath.relpath(in_site(resolved(path, page.file)), here or ".")
        return match[1] + target + hash_ + anchor

    # python-markdown knows no second word beside the language
    return LINK.sub(link, re.sub(r"^```python \w+$", "```python", markdown, flags=re.M))


def in_site(path: str) -> str:
    """Return where the site has the file of a path in the repository."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def resolved(path: str, file: File) -> str:
    """Return the path in the repository of what a file links to."""
    folder = Path(file.abs_src_path or "").parent.relative_to(ROOT).as_posix()
    return posixpath.normpath(posixpath.join(folder, path))


def linked(file: File) -> list[str]:
    """Return the paths in the repository that a page links to."""
    if not file.is_documentation_page():
        return []
    targets = [match[2].partition("#")[0] for match in LINK.finditer(file.content_string)]
    return [resolved(target, file) for target in targets if target and "://" not in target]
