"""What widgets of third parties leave out for screen readers, added in the browser.

::

    Tabulator 6   grid ► (div tabindex ► rowgroup ► rows), footer ► buttons      a grid may hold rows and rowgroups only
                  grid ► (rowgroup     ► none     ► rows), rowgroup ► row ► gridcell ► buttons
    Material UI   the page's progress bar and the list as a drawer have no name, the handle of the list and icons with
                  a name have no role

Widgets are made anew at any time and live in shadow roots, which no single observer sees: a look every second, which
takes about a millisecond.
"""

from __future__ import annotations

import panel as pn

__all__ = ["Aria"]


class Aria(pn.custom.JSComponent):
    """Invisible; mends the page that it is on while it is there."""

    _esm = """
    const ROLES = [
      [".tabulator[role=grid] > .tabulator-tableholder", "rowgroup"],
      [".tabulator[role=grid] > .tabulator-tableholder > .tabulator-table", "none"],
      [".tabulator[role=grid] > .tabulator-footer", "rowgroup"],
      [".tabulator[role=grid] > .tabulator-footer > .tabulator-footer-contents", "row"],
      [".tabulator[role=grid] .tabulator-footer-contents > .tabulator-paginator", "gridcell"],
      ["[aria-label='Resize sidebar']", "separator"],
      ["span[aria-label]:not([role])", "img"],
    ];

    function* roots(root) {
      yield root;
      for (const element of root.querySelectorAll("*")) {
        if (element.shadowRoot) yield* roots(element.shadowRoot);
      }
    }

    function mend() {
      if (document.hidden) return;
      for (const root of roots(document)) {
        for (const [selector, role] of ROLES) {
          for (const element of root.querySelectorAll(selector)) {
            if (element.getAttribute("role") !== role) element.setAttribute("role", role);
          }
        }
        for (const bar of root.querySelectorAll("[role=progressbar]:not([aria-label]):not([aria-labelledby])")) {
          bar.setAttribute("aria-label", "progress");
        }
        for (const drawer of root.querySelectorAll("[role=dialog]:not([aria-label]):not([aria-labelledby])")) {
          drawer.setAttribute("aria-label", "checkpoints");
        }
      }
    }

    export function render({model}) {
      mend();
      const timer = setInterval(mend, 1000);
      model.on("remove", () => clearInterval(timer));
    }
    """
