"""Fixes for third-party widgets, applied in the browser: what screen readers need, and the page numbers of tables.

::

    Tabulator 6   grid ► (div tabindex ► rowgroup ► rows), footer ► buttons      a grid may only contain rows and groups
                  grid ► (rowgroup     ► none     ► rows), rowgroup ► row ► gridcell ► buttons
    Material UI   the page's progress bar and the checkpoint drawer have no name; the drawer's handle and named icons
                  have no role
    Panel 1.9.4   a table first shown at page 4 has the rows of page 4, but the button of page 1 is pressed
                  a table whose number of pages changes before it is drawn throws an error; drawn, it has that number

Widgets are re-created at any time and live in shadow roots, which no single observer sees. The page is therefore
checked every second, which takes about a millisecond.
"""

from __future__ import annotations

import panel as pn


class Aria(pn.custom.JSComponent):
    """Invisible; fixes the page that contains it."""

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

    function* views(parents) {
      for (const view of parents) {
        yield view;
        yield* views(view.child_views ?? []);
      }
    }

    // Tabulator draws the buttons after parsing a remote page, which Panel does instead
    function number() {
      for (const {tabulator} of views(window.Bokeh?.index?.roots ?? [])) {
        const pressed = tabulator?.element?.querySelector(".tabulator-page.active");
        if (pressed && pressed.dataset.page !== String(tabulator.getPage())) tabulator.modules.page._setPageButtons();
      }
    }

    // Material UI draws a tab some time after its views are created; until then a table's view has no table
    function guard() {
      const view = window.Bokeh?.Models.get("panel.models.tabulator.DataTabulator")?.prototype.default_view.prototype;
      for (const name of view ? ["setMaxPage", "setPage"] : []) {
        const set = view[name];
        view[name] = function () { if (this.tabulator) set.call(this); };
      }
    }

    guard();

    export function render({model}) {
      mend();
      const timer = setInterval(() => { mend(); number(); }, 1000);  // views are incomplete while the page is built
      model.on("remove", () => clearInterval(timer));
    }
    """
