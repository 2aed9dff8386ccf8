"""Buttons that download the data of a tab as a file, created on demand.

Paths in the files are relative to ROOT, as on the page.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import panel_material_ui as pmui

from workbench.app.jail import relative_html, relative_values


def csv_button(name: str, frame: Callable[[], Any], label: str = "CSV") -> pmui.FileDownload:
    """Return a button for a CSV of ``frame()``. Cells that a spreadsheet would execute begin with a quote."""

    def made() -> io.BytesIO:
        table = frame().copy()
        for column in table.select_dtypes(include=["object", "string", "category"]):
            table[column] = [_escape_formula(relative_values(cell)) for cell in table[column]]
        return io.BytesIO(table.to_csv(index=False).encode("utf-8", "backslashreplace"))

    return _button(f"{name}.csv", made, label)


def json_button(name: str, document: Callable[[], Any]) -> pmui.FileDownload:
    """Return a button for a JSON document in ASCII."""
    return _button(
        f"{name}.json",
        lambda: io.BytesIO(json.dumps(relative_values(document()), indent=1, allow_nan=False).encode()),
        "JSON",
    )


def text_button(name: str, text: Callable[[], str], label: str) -> pmui.FileDownload:
    """Return a button for a text file, such as an HTML page."""

    def made() -> io.BytesIO:
        return io.BytesIO(relative_html(text()).encode("utf-8", "backslashreplace"))

    return _button(name, made, label)


def _escape_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def _button(filename: str, callback: Callable[[], io.BytesIO], label: str) -> pmui.FileDownload:
    safe = "".join(char if char.isalnum() or char in "._-" else "_" for char in filename)
    button = pmui.FileDownload(callback=callback, filename=safe, label=f"Download {label}", size="small", margin=(5, 5))
    button.param.update(
        color="primary", variant="outlined"
    )  # Panel 1.9.4 warns about its own aliases if they are passed above
    return button
