"""``panel serve workbench/app --args ROOT`` runs this once per session; ROOT defaults to the current folder."""

from __future__ import annotations

import sys

from workbench.app.page import create_app

create_app(sys.argv[1] if len(sys.argv) > 1 else ".").servable()
