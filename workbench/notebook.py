"""Set a notebook up for interactive tables and plots, with no request leaving the machine.

The reprs of checkpoints and tensors are plain HTML and need none of this.
"""

from __future__ import annotations

__all__ = ["enable"]


def enable(*, inline: bool = True) -> None:
    """Load Panel's and HoloViews' notebook extensions.

    Call it before importing ``hvplot.pandas``: whichever loads the extension first decides where the scripts come
    from.

    Args:
        inline: put the scripts (about 10 MB) into the notebook, so that it works without a network; with ``False`` the
            browser fetches them from Panel's server of packages, and the saved notebook stays small.
    """
    import panel as pn

    pn.extension("tabulator", inline=inline)
