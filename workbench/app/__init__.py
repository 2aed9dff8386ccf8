"""The dashboard: one Panel ``Viewer`` per tab over one small shared state; no analysis of its own.

::

    URL  ◄──►  state (path, tensor, tab, pattern)  ◄──►  widgets of the tabs
                 │ path
                 ▼
    jail ──► registry (process-wide, counted) ──► Checkpoint ──► jobs (threads) ──► plots ──► panes

``workbench serve ROOT`` and ``panel serve workbench/app --args ROOT`` serve the same page.
Nothing is imported here, because ``panel serve`` runs this file as a separate package.
"""
