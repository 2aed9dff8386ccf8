"""Set up a notebook for interactive tables and plots, without network requests.

The reprs of checkpoints and tensors are plain HTML and do not need this; key completion also works without it.
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


_chosen = False  #: whether :func:`enable` was called, with either choice of where the scripts come from


def enabled() -> None:
    """Call :func:`enable` unless it was called before."""
    if not _chosen:
        enable()


def enable(*, inline: bool = True) -> None:
    """Load Panel's and HoloViews' notebook extensions and complete parameter names (:func:`complete_names`).

    Call it before importing ``hvplot.pandas``, which loads the extension again.

    Args:
        inline: embed the scripts (about 10 MB) in the notebook so that it works offline. With ``False`` the browser
            fetches them from Panel's CDN, and the saved notebook stays small.
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
    """Close two gaps through which notebooks with ``inline=True`` still fetch from Panel's CDN (versions below).

    ``import hvplot.pandas`` (0.12) loads HoloViews' extension with its defaults. Plots shown by HoloViews (1.23) link
    to Panel's style sheets by URL: Panel (1.9) inlines them in ``_repr_mimebundle_``, which HoloViews does not call.
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
    """Complete the names in ``ckpt.param("…`` with the Tab key; ``%load_ext workbench`` enables it too.

    IPython completes the keys of mappings by itself, but not the string arguments of methods.
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
    """Evaluate an expression, if IPython considers it safe to evaluate during typing."""
    from IPython.core.guarded_eval import EvaluationContext, guarded_eval

    try:
        context = EvaluationContext(globals=shell.user_global_ns, locals=shell.user_ns, evaluation="limited")
        return guarded_eval(expression, context)
    except Exception:  # an undefined name, an incomplete expression, or one that needs a call
        return None
