"""What the Tab key offers in IPython, asked of IPython's own completer, with jedi and without."""

from __future__ import annotations

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import workbench as wb


@pytest.fixture(params=[False, True], ids=["plain", "jedi"])
def complete(request, samples):
    """A function: a line → the lines that Tab makes of it, with ``ckpt``, ``stacked`` and ``runs`` in the session."""
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.Completer.use_jedi = request.param
    ckpt = wb.open(samples / "dcp_fsdp2")
    shell.user_ns.update(ckpt=ckpt, runs=[ckpt], stacked=wb.open(samples / "megatron_dp_reshardable"))
    for _ in range(2):  # twice, as notebooks are run again
        shell.run_line_magic("load_ext", "workbench")
        wb.load_ipython_extension(shell)

    def complete(line: str) -> list[str]:
        with provisionalcompleter():
            found = shell.Completer.completions(line, len(line))
            return [line[: one.start] + one.text + line[one.end :] for one in found]

    return complete


def test_keys_of_tensors(complete):
    assert complete('ckpt["model.lm') == ['ckpt["model.lm_head.weight']
    assert complete("x = ckpt['model.lm") == ["x = ckpt['model.lm_head.weight"]
    key = "decoder.layers.mlp.linear_fc1.weight"  # a view, which is not listed
    assert f'stacked["{key}' in complete('stacked["decoder.layers.mlp')


def test_names_of_objects(complete):
    assert complete('ckpt.objects["train_state.s') == ['ckpt.objects["train_state.step']


def test_keys_of_views(complete):
    key = "decoder.layers.mlp.linear_fc1.weight"
    assert f'stacked.views["{key}' in complete('stacked.views["decoder.layers.mlp')


def test_names_of_parameters(complete):
    assert complete('ckpt.param("lm') == ['ckpt.param("lm_head.weight']
    assert complete("print(ckpt.param('lm") == ["print(ckpt.param('lm_head.weight"]
    assert complete("runs[0].param(fqn='lm") == ["runs[0].param(fqn='lm_head.weight"]
    assert len(complete('ckpt.param("model.layers.0.')) == 9
    assert complete('nowhere.param("lm') == []
