"""HTML with links inside the page: a click changes the state, a middle click opens the same in a new tab."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import panel as pn
import param

from workbench.app import style
from workbench.app.state import parse_query


class Linked(pn.custom.JSComponent):
    """Shows HTML whose links ``<a href="?…">`` are followed without loading the page again.

    Args:
        text: HTML in the page's style; foreign text in it must be escaped.
        follow: called with the state's values that a clicked link names, see
            :func:`~workbench.app.state.parse_query`.
    """

    text = param.String(default="")

    _esm = """
    export function render({model}) {
      const place = document.createElement("div");
      const show = () => { place.innerHTML = model.text };
      place.addEventListener("click", (event) => {
        const link = event.target.closest("a[href^='?']");
        if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        model.send_msg(link.getAttribute("href"));
      });
      model.on("text", show);
      show();
      const first = document.getElementById("first");  // shown until here, and what was clicked in it: app/page.py
      const live = () => {
        if (!window.Bokeh.documents.every((one) => one.is_idle)) setTimeout(live, 50);
        else if (first.dataset.wanted) model.send_msg(first.dataset.wanted);
      };
      if (first) requestAnimationFrame(() => { first.remove(); live() });
      return place;
    }
    """

    def __init__(self, text: str, follow: Callable[[dict[str, str]], None], sheet: str = "", **params: Any) -> None:
        defaults = {"sizing_mode": "stretch_width", "margin": (0, 10), "stylesheets": [style.HTML, style.LINKS, sheet]}
        super().__init__(text=text, **{**defaults, **params})
        self.on_msg(lambda event: follow(parse_query(str(event.data))))
