"""Standalone HTML files, to keep or to send: no network, light or dark like the browser."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from workbench.errors import WriteError

MARK = b"<!DOCTYPE html>"
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
       background: Canvas; color: CanvasText; overflow-wrap: anywhere; }
h1 { font-size: 1.3em; } h2 { font-size: 1.1em; margin: 1.6em 0 .3em; }
.verdict { font-size: 1.15em; }
table { border-collapse: collapse; font-size: .93em; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; } figure { margin: 0 0 2em; } figcaption { opacity: .8; }
"""


def page_of(title: str, body: str, figures: Mapping[str, Any], *, hint: str = "") -> str:
    """Return a standalone page, with Bokeh's scripts in it if it has figures (a megabyte).

    Args:
        title: as plain text.
        body: HTML; ``<!--name-->`` in it is the place of the figure of that name.
        figures: name → Bokeh's model.
        hint: shown over the title.
    """
    head = ""
    if figures:
        from bokeh.document import Document
        from bokeh.embed import components
        from bokeh.resources import Resources
        from bokeh.themes import default

        own = Document()  # without it, Bokeh uses the current one, whose session may just have ended
        for figure in figures.values():
            own.add_root(figure)
        script, divs = components(dict(figures), theme=default)
        for name, div in divs.items():
            body = body.replace(f"<!--{name}-->", div, 1)
        # INLINE would bring every widget and Panel's, too
        scripts = Resources(mode="inline", components=["bokeh"]).js_raw
        head, body = f"<script>{''.join(scripts)}</script>", body + script
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>{head}</head>'
        f'<body><h1 title="{hint}">{escape(title)}</h1>{body}</body></html>\n'
    )


def page_path(path: str | os.PathLike[str], option: str = "") -> Path:
    """Return the path to which a page will be written; refuse a bad one before anything is read, not an hour later.

    Args:
        option: the user's name for it, for the message.

    Raises:
        WriteError: it is a folder, its folder does not exist, or another kind of file is there.
    """
    from workbench.analysis.manifest_file import holds_other

    target, named = Path(path), f"{option} {os.fspath(path)!r}".strip()
    if target.is_dir() or not target.parent.is_dir():
        raise WriteError(f"{named}: " + ("is a folder" if target.is_dir() else "its folder does not exist"))
    if holds_other(target, MARK):
        raise WriteError(f"{named}: exists and is not a page, so it is not replaced; name another file")
    return target


def write_page(page: str, target: Path) -> None:
    """Write a page at once: an old one stays until the new one is complete.

    Raises:
        WriteError: it cannot be written.
    """
    half = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        half.write_text(page, "utf-8")
        half.replace(target)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise WriteError(f"{os.fspath(target)!r} cannot be written: {error.strerror}") from None
