"""Set a notebook up for interactive tables and plots, with no request leaving the machine.

The reprs of checkpoints and tensors are plain HTML and need none of this; keys complete without it too.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from workbench.checkpoint import Checkpoint

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["complete_names", "enable", "enabled"]

#: ``ckpt.param("model.la``: an expression of names, attributes and subscripts, and the beginning of a string.
_CALL = re.compile(r"""([A-Za-z_][\w.\[\]'"]*)\.param\(\s*(?:fqn\s*=\s*)?(["'])((?:(?!\2).)*)$""")


_chosen = False  #: whether somebody said where the scripts come from


def enabled() -> None:
    """As :func:`enable`, unless it was called before."""
    if not _chosen:
        enable()


def enable(*, inline: bool = True) -> None:
    """Load Panel's and HoloViews' notebook extensions, and complete parameters' names (:func:`complete_names`).

    Call it before importing ``hvplot.pandas``, which loads the extension again.

    Args:
        inline: put the scripts (about 10 MB) into the notebook, so that it works without a network; with ``False`` the
            browser fetches them from Panel's server of packages, and the saved notebook stays small.
    """
    global _chosen
    import panel as pn

    _chosen = True
    if inline:
        _keep_inside()
    pn.extension("tabulator", inline=inline)
    if (shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) is not None:
        complete_names(shell)


def _keep_inside() -> None:
    """Two ways in which notebooks that say ``inline=True`` fetch from Panel's server all the same (versions below).

    ``import hvplot.pandas`` (0.12) loads HoloViews' extension with its defaults. Plots that HoloViews (1.23) shows name
    Panel's style sheets by address: what Panel (1.9) does about it in ``_repr_mimebundle_`` is not on their way.
    """
    from holoviews.ipython import notebook_extension
    from panel.viewable import Viewable

    notebook_extension.inline = True
    if _styles_inside not in Viewable._preprocessing_hooks:
        Viewable._preprocessing_hooks.append(_styles_inside)


def _styles_inside(view: Any, root: Any) -> None:
    from bokeh.models import UIElement
    from panel.io.notebook import patch_inline_stylesheets

    for model in root.select({"type": UIElement}):
        patch_inline_stylesheets(model)


def complete_names(shell: InteractiveShell) -> None:
    """Complete the names in ``ckpt.param("…`` with the Tab key; ``%load_ext workbench`` does it.

    IPython asks a mapping for its keys by itself, and nobody for the strings that a method takes.
    """
    from IPython.core.completer import context_matcher

    matchers = shell.Completer.custom_matchers
    if any(getattr(matcher, "matcher_identifier", None) == _IDENTIFIER for matcher in matchers):
        return

    @context_matcher(identifier=_IDENTIFIER)
    def parameters(context: CompletionContext) -> SimpleMatcherResult:
        return _parameters(shell, context.text_until_cursor)

    matchers.append(parameters)


_IDENTIFIER = "workbench.parameters"


def _parameters(shell: InteractiveShell, text: str) -> Any:
    from IPython.core.completer import SimpleCompletion

    call = _CALL.search(text)
    ckpt = _value(shell, call[1]) if call else None
    if call is None or not isinstance(ckpt, Checkpoint):
        return {"completions": []}
    names = dict.fromkeys(name for name in ckpt.fqns if name is not None and name.startswith(call[3]))
    return {
        "completions": [SimpleCompletion(text=name, type="parameter") for name in names],
        "matched_fragment": call[3],
        "suppress": bool(names),
    }


def _value(shell: InteractiveShell, expression: str) -> object:
    """What an expression means, if IPython dares to evaluate it while somebody types."""
    from IPython.core.guarded_eval import EvaluationContext, guarded_eval

    try:
        context = EvaluationContext(globals=shell.user_global_ns, locals=shell.user_ns, evaluation="limited")
        return guarded_eval(expression, context)
    except Exception:  # a name that is not there yet, half an expression, what only a call could tell
        return None
