"""The result of an export or a dry run: figures, files and their contents, and the proof.

::

    reads 1.2 GiB · writes 1.2 GiB · memory up to 64 MiB
    file                 bytes   tensors          ◄── click to show its contents
    └ tensor, shape, dtype, bytes
    notes                                         downloads
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import panel as pn

from workbench.app import style
from workbench.app.save import csv_button, json_button
from workbench.app.words import count, html, safe, size
from workbench.export.report import change_words
from workbench.views.export import cast_words, export_facts

if TYPE_CHECKING:
    import pandas as pd

    from workbench.export.report import ExportReport

FILES: dict[str, tuple[str, str, int | None]] = {
    "file": ("File", "text", None),
    "nbytes": ("Bytes", "bytes", 110),
    "tensors": ("Tensors", "count", 100),
}
TENSORS: dict[str, tuple[str, str, int | None]] = {
    "name": ("Name", "text", None),
    "shape": ("Shape", "text", 150),
    "dtype": ("Dtype", "text", 130),
    "nbytes": ("Bytes", "bytes", 100),
    "key": ("Source", "text", 220),
}
PAGE = 8


class ExportView(pn.viewable.Viewer):
    """The report of an export or a dry run.

    Args:
        where: the target, as shown on the page.
        file: base name of downloads.
    """

    def __init__(self, report: ExportReport, *, where: str, file: str = "export", **params: Any) -> None:
        super().__init__(**params)
        self.report = report
        self.files = style.table(file_rows(report), FILES, page_size=PAGE, selectable=1)
        self.files.on_click(lambda event: self.look_into(event.row))
        self._title = style.pane("")
        self._holds = pn.Column(sizing_mode="stretch_width")
        saves = pn.Row(
            csv_button(f"{file}-files", lambda: file_rows(report), "files CSV"),
            csv_button(f"{file}-tensors", lambda: tensor_rows(report), "tensors CSV"),
            json_button(file, lambda: report.to_dict() | {"path": where}),
            margin=(0, 5),
        )
        head = style.pane(_head(report, where))
        notes = [style.pane(_notes(report))] if report.notes else []
        self._body = pn.Column(head, *notes, self.files, self._title, self._holds, saves, sizing_mode="stretch_width")
        self.look_into(max(range(len(report.files)), key=lambda at: report.files[at].nbytes, default=None))

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def look_into(self, at: int | None) -> None:
        """Show the contents of a file."""
        if at is None:
            return
        one = self.report.files[int(at)]
        rows = tensor_rows(self.report, one.name)
        self._title.object = f'<h3>In <span class="name">{html(one.name)}</span></h3>'
        if len(rows):
            renamed = bool((rows["key"] != "").any())
            columns = {name: column for name, column in TENSORS.items() if renamed or name != "key"}
            self._holds[:] = [style.table(rows[list(columns)], columns, page_size=PAGE)]
        else:
            self._holds[:] = [style.pane('<p class="muted">no tensors: metadata, or a file copied from the source</p>')]


def file_rows(report: ExportReport) -> pd.DataFrame:
    """Return one row per file."""
    import pandas as pd

    rows = [(safe(one.name), one.nbytes, one.tensors) for one in report.files]
    return pd.DataFrame(rows, columns=list(FILES))


def tensor_rows(report: ExportReport, file: str | None = None) -> pd.DataFrame:
    """Return one row per tensor, or per rank's piece of one; of one file, or of all."""
    import pandas as pd

    rows = [
        (
            safe(one.file),
            safe(one.name),
            " × ".join(map(str, one.shape)) or "scalar",
            cast_words(one.source_dtype, one.dtype),
            one.nbytes,
            "" if one.key == one.name else safe(one.key),
        )
        for one in report.tensors
        if file is None or one.file == file
    ]
    return pd.DataFrame(rows, columns=["file", *TENSORS])


def proof(report: ExportReport, where: str, manifest: tuple[str, str] | None) -> str:
    """Return the HTML that shows that the output equals the source; ``manifest`` is its path and digest."""
    if report.identical:
        result = f"All {count(len(report.tensors))} tensors are bit-identical to the source."
    else:
        words = "; ".join(change_words(report.casts))
        result = f"{count(len(report.casts))} of {count(len(report.tensors))} tensors were cast or changed: {words}."
    again = "It was read back before being renamed into place; all fingerprints matched." if report.verified else ""
    parts = [style.message(f"Written in {report.seconds:.1f} s. {result} {again}")]
    rows = [("Where", html(where))]
    if manifest is not None:
        rows += [("Manifest", html(manifest[0])), ("Digest", f"xxh3_128 {html(manifest[1])}")]
    cells = "".join(f'<tr><th>{name}</th><td class="name" style="white-space:normal">{t}</td></tr>' for name, t in rows)
    return f'<h3>Proof</h3>{"".join(parts)}<table class="proof">{cells}</table>'


def _head(report: ExportReport, where: str) -> str:
    verb = "Would write" if report.dry_run else "Wrote"
    what = f"{count(len(report.files))} file{'s' if len(report.files) != 1 else ''}, {size(report.nbytes)}"
    rows = "".join(
        f'<tr><th>{html(name)}</th><td style="white-space:normal">{html(text)}</td></tr>'
        for name, text in export_facts(report, width=400)
    )
    return f'<h3>{verb} {what} as <span class="name">{html(where)}</span></h3><table>{rows}</table>'


def _notes(report: ExportReport) -> str:
    return "<ul>" + "".join(f"<li>{html(one)}</li>" for one in report.notes) + "</ul>"
