"""What a mistyped name was meant to be."""

from __future__ import annotations

import pytest

from workbench.core.near import did_you_mean, near

FEW = ["model.lm_head.weight", "model.norm.weight", "optim.state.lm_head.weight.exp_avg"]
MANY = [
    f"model.layers.{i}.mlp.experts.{j}.{name}.weight" for i in range(50) for j in range(500) for name in ("w1", "w2")
]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("model.lm_haed.weight", FEW[0]), ("lm_head", FEW[0]), ("norm", FEW[1]), ("lm_head.weight.exp_avg", FEW[2])],
)
def test_a_slip_and_a_part_of_a_name(name, meant):
    assert near(name, FEW)[0] == meant


@pytest.mark.parametrize("at", range(0, 39, 3))
def test_a_slip_anywhere_among_many_names(at):
    meant = "model.layers.37.mlp.experts.142.w2.weight"
    for wrong in (meant[:at] + "~" + meant[at + 1 :], meant[:at] + meant[at + 1 :]):
        assert meant in near(wrong, MANY, count=40)  # a slip in a number is as near to many others


def test_the_beginning_may_lack_among_many_names():
    assert near("layers.37.mlp.experts.142.w2.weight", MANY)[0] == "model.layers.37.mlp.experts.142.w2.weight"


@pytest.mark.parametrize("known", [FEW, MANY + FEW])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("Model.Norm.Weight", FEW[1]), ("MODEL.LM_HAED.WEIGHT", FEW[0]), ("LM_head.Weight.exp_AVG", FEW[2])],
)
def test_capital_and_small_letters_are_alike(known, name, meant):
    assert near(name, known)[0] == meant
    assert near("Lr", ["lr"]) == ["lr"] and near("Lr", ["lr", "LR"]) == ["lr", "LR"]


@pytest.mark.parametrize("name", ["", "w", "nothing like any of them", 3, None, ("a",)])
def test_nothing_is_suggested_where_nothing_is_near(name):
    assert did_you_mean(name, FEW) == did_you_mean(name, MANY) == did_you_mean(name, []) == ""
