"""What the doctor knows of a state: numbered moments, masters, the optimizer and its laws, settings, counters, ties."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.lab.catalogue import EVERY
from tests.lab.drawn import draw
from workbench.doctor.facts.evidence import Evidence, State, is_numbered
from workbench.doctor.facts.gather import gather
from workbench.doctor.facts.optimizer import ALL_LAWS, recognise
from workbench.doctor.passes.updates import between

torch = pytest.importorskip("torch")
NAN, HUGE = float("nan"), 10**400
GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}


def state(path: Path) -> State:
    ckpt = wb.open(str(path), cache=False)
    return State(ckpt, gather(ckpt))


def pair(a: State, b: State) -> Any:
    return Evidence(a, after=b).pair("before", "after")


def net(seed: int = 0) -> Any:
    """Two matrices of one shape, one of another, and three vectors of one shape."""
    torch.manual_seed(seed)
    layers = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 5, bias=False)
    return torch.nn.ModuleDict(dict(zip(("one", "two", "norm", "head"), layers, strict=True)))


def trained(model: Any, optimizer: Any, updates: int = 3) -> Any:
    for _ in range(updates):
        optimizer.zero_grad()
        x = torch.randn(4, 8)
        model["head"](model["norm"](model["two"](model["one"](x)))).square().mean().backward()
        optimizer.step()
    return optimizer


def decayed(model: Any) -> list[dict[str, Any]]:
    """Matrices that decay, then vectors that do not: the order of the Trainer's groups."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def trainer(folder: Path, model: Any, optimizer: Any, step: int) -> Path:
    """A Trainer's folder: safetensors, which sorts the names, beside an optimizer that only numbers."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(decayed(model), lr=1e-3, betas=(0.9, 0.95))


# ---- numbered state ------------------------------------------------------------------------------------------------


def test_numbered_moments_are_parameters_of_their_own(tmp_path: Path) -> None:
    model = net()
    optimizer = trained(model, adamw(model))
    found = state(trainer(tmp_path / "checkpoint-3", model, optimizer, 3))
    # of 7 parameters only the head's shape is unique: number 2 of the matrices one, two, head
    assert found.numbered == {f"optimizer state {n}": n for n in (0, 1, 3, 4, 5, 6)}
    assert set(found.params["head.weight"]) == {"param", "step", "exp_avg", "exp_avg_sq"}
    for name, number in found.numbered.items():
        assert is_numbered(name) and set(found.params[name]) == {"step", "exp_avg", "exp_avg_sq"}
        stored = list(optimizer.state.values())[number]["exp_avg_sq"]
        at = found.params[name]["exp_avg_sq"]
        assert torch.equal(torch.from_numpy(found.ckpt[found.ckpt.catalog.keys[at]].numpy()), stored)
    assert found.facts.steps.by_name == dict.fromkeys([*found.numbered, "head.weight"], 3.0)
    assert not is_numbered("head.weight") and not is_numbered("state.3.weight")


def test_settings_of_numbered_state_are_its_groups(tmp_path: Path) -> None:
    model = net()
    facts = state(trainer(tmp_path / "checkpoint-3", model, trained(model, adamw(model)), 3)).facts
    assert [len(group.params) for group in facts.groups] == [3, 4]
    assert facts.weight_decay("optimizer state 0") == 0.1 and facts.weight_decay("optimizer state 4") == 0.0
    assert facts.group_of("optimizer state 1").betas == (0.9, 0.95) and facts.group_of("head.weight").lr == 1e-3
    # which matrix is number 0 is not certain; that both are in the first group is: all of their shape are
    assert facts.weight_decay("one.weight") == 0.1 and facts.weight_decay("norm.weight") == 0.0


def test_weights_of_a_shape_that_two_groups_share_stay_without_a_group(tmp_path: Path) -> None:
    model = net()
    weights = list(model.parameters())
    groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]
    facts = state(trainer(tmp_path / "checkpoint-3", model, trained(model, torch.optim.AdamW(groups)), 3)).facts
    assert facts.group_of("one.weight") is None and facts.group_of("head.weight").weight_decay == 0.0


def test_a_pair_of_trainer_folders_shares_every_moment(tmp_path: Path) -> None:
    model = net()
    optimizer = trained(model, adamw(model))
    a = state(trainer(tmp_path / "checkpoint-3", model, optimizer, 3))
    b = state(trainer(tmp_path / "checkpoint-5", model, trained(model, optimizer, 2), 5))
    shared = dict(pair(a, b).shared())
    assert sum("exp_avg" in roles for roles in shared.values()) == 7
    assert {(one.k, one.lag, one.before) for one in between(pair(a, b)).values()} == {(2, 0, 3)}


@pytest.mark.parametrize("named_first", [True, False])
def test_a_number_that_one_side_has_a_name_for_is_the_same_number(tmp_path: Path, named_first: bool) -> None:
    """torch.save keeps the model's order, so that its reader joins all numbers; a Trainer's folder joins one."""
    model = net()
    optimizer = trained(model, adamw(model))
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(held, tmp_path / "step-3.pt")
    named, numbered = state(tmp_path / "step-3.pt"), state(trainer(tmp_path / "checkpoint-3", model, optimizer, 3))
    assert not named.numbered and len(numbered.numbered) == 6
    a, b = (named, numbered) if named_first else (numbered, named)
    aligned = pair(a, b)
    assert list(aligned.stored.ckpt.catalog.keys) == list(a.ckpt.catalog.keys)  # as stored, under whatever names
    shared = dict(aligned.shared())
    moments = [(fqn, roles["exp_avg"]) for fqn, roles in shared.items() if "exp_avg" in roles]
    assert len(moments) == 7 and sum("param" in roles for roles in shared.values()) == 7
    for _, (mine, theirs) in moments:
        one, two = aligned.a.ckpt.catalog.keys[mine], b.ckpt.catalog.keys[theirs]
        assert torch.equal(torch.from_numpy(aligned.a.ckpt[one].numpy()), torch.from_numpy(b.ckpt[two].numpy()))
    assert {aligned.a.facts.weight_decay(fqn) for fqn, _ in moments} == {0.1, 0.0}
    assert {update.k for update in between(aligned).values()} == {0}


def test_two_optimizers_have_numbers_of_their_own(tmp_path: Path) -> None:
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}
    one = {"state": {0: moments, 1: moments}, "param_groups": [GROUP | {"params": [0, 1]}]}
    two = {"state": {0: moments | {"step": torch.tensor(9.0)}}, "param_groups": [GROUP | {"lr": 0.5, "params": [0]}]}
    weights = {name: torch.zeros(2, 2) for name in ("a.weight", "b.weight")}
    torch.save({"model": weights, "optimizer": one, "optimizer_2": two}, tmp_path / "both.pt")
    found = state(tmp_path / "both.pt")
    names = ["optimizer state 0", "optimizer state 1", "optimizer_2 state 0"]
    assert sorted(found.numbered) == names
    assert [found.facts.steps.by_name[name] for name in names] == [3.0, 3.0, 9.0]
    assert [found.facts.group_of(name).lr for name in names] == [1e-3, 1e-3, 0.5]


def test_weights_under_other_names_and_moments_by_number(tmp_path: Path) -> None:
    """Numbers agree in any two models: that they do is no reason to pair the weights by name alone."""
    for file, head in (("a.pt", "layers"), ("b.pt", "model.layers")):
        weights = {f"{head}.{n}.fc.weight": torch.full((4, 4), float(n)) for n in range(4)}
        moments = {"step": torch.tensor(5.0), "exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4)}
        optimizer = {"state": dict.fromkeys(range(4), moments), "param_groups": [GROUP | {"params": [0, 1, 2, 3]}]}
        torch.save({"model": weights, "optimizer": optimizer}, tmp_path / file)
    aligned = pair(state(tmp_path / "a.pt"), state(tmp_path / "b.pt"))
    shared = dict(aligned.shared())
    assert [fqn for fqn, roles in shared.items() if "param" in roles] == [
        f"model.layers.{n}.fc.weight" for n in range(4)
    ]
    assert [fqn for fqn, roles in shared.items() if set(roles) == {"step", "exp_avg", "exp_avg_sq"}] == [
        f"optimizer state {n}" for n in range(4)
    ]


# ---- masters, quantised state --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: {"master_weights": m},
        lambda m: {"master_params": {f"module.{k}": v for k, v in m.items()}},
        lambda m: {"fp32_params": m},
        lambda m: {"fp32_from_fp16_params": m},
        lambda m: {f"master_weights.{k}": v for k, v in m.items()},
    ],
)
def test_masters_outside_of_the_optimizer_are_their_parameters(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    model = net()
    masters = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({"model": model.bfloat16().state_dict(), **wrap(masters)}, tmp_path / "m.pt")
    found = state(tmp_path / "m.pt")
    assert set(found.params) == set(masters)
    for name, master in masters.items():
        key = found.ckpt.catalog.keys[found.params[name]["master"]]
        assert torch.equal(torch.from_numpy(found.ckpt[key].numpy()), master)


def test_masters_in_lists_are_numbered(tmp_path: Path) -> None:
    lists = {"optimizer": {"fp32_from_fp16_params": [[torch.ones(3), torch.ones(2)], [torch.ones(4)]]}}
    torch.save({"model": {"fc.weight": torch.ones(3, 3)}, **lists}, tmp_path / "apex.pt")
    found = state(tmp_path / "apex.pt")
    masters = {name for name, roles in found.params.items() if "master" in roles}
    assert masters == {f"optimizer master {at}" for at in ("0.0", "0.1", "1.0")} and found.numbered == {}


def eight_bit(wrapped: bool) -> dict[str, Any]:
    held = {"state1": torch.zeros(4, 4, dtype=torch.uint8), "state2": torch.zeros(4, 4, dtype=torch.uint8)}
    held |= {"qmap1": torch.zeros(256), "qmap2": torch.zeros(256), "absmax1": torch.zeros(1), "absmax2": torch.zeros(1)}
    return {"step": 8, "__bnb_optimizer_quant_state__": held} if wrapped else {"step": 8, **held}


@pytest.mark.parametrize("wrapped", [True, False])
def test_eight_bit_state_has_roles_of_its_own(tmp_path: Path, wrapped: bool) -> None:
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "alpha": 0.0, "params": [0]}
    small = {"state1": torch.zeros(4), "state2": torch.zeros(4), "step": 8}
    optimizer = {"state": {0: eight_bit(wrapped), 1: small}, "param_groups": [group, group | {"params": [1]}]}
    weights = {"fc.weight": torch.ones(4, 4), "fc.bias": torch.ones(4)}
    torch.save({"model": weights, "optimizer": optimizer, "step": 8}, tmp_path / "b.pt")
    found = state(tmp_path / "b.pt")
    roles = {role for each in found.params.values() for role in each}
    assert {"state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"} <= roles
    assert not roles & {"exp_avg", "exp_avg_sq", "other"}
    assert found.facts.optimizer.family == "8-bit Adam" and found.facts.optimizer.laws == {"counter"}
    assert found.facts.counters["optimizer"] == (8.0, "optimizer.state.0.step")
    assert list(found.facts.steps.by_name.values()) == [8.0, 8.0]


def test_codes_under_a_moments_name_are_no_moment(tmp_path: Path) -> None:
    """torchao keeps ``codes``, ``scale`` and ``qmap`` inside of exp_avg."""
    codes = {"codes": torch.zeros(16, dtype=torch.uint8), "scale": torch.zeros(1), "qmap": torch.zeros(256)}
    held = {0: {"step": torch.tensor(2.0), "exp_avg": codes, "exp_avg_sq": codes}}
    optimizer = {"state": held, "param_groups": [GROUP | {"params": [0]}]}
    torch.save({"model": {"fc.weight": torch.ones(4, 4)}, "optimizer": optimizer}, tmp_path / "ao.pt")
    found = state(tmp_path / "ao.pt")
    roles = {role for each in found.params.values() for role in each}
    assert {"exp_avg.codes", "exp_avg_sq.scale"} <= roles and "exp_avg" not in roles
    assert found.facts.optimizer.family == "8-bit Adam" and "moments" not in found.facts.optimizer.laws


# ---- which optimizer -----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": (lambda p: torch.optim.AdamW(p), ALL_LAWS),
    "Adam": (lambda p: torch.optim.Adam(p), ALL_LAWS),
    "AMSGrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), ALL_LAWS - {"replay"}),
    "RAdam": (lambda p: torch.optim.RAdam(p), {"moments", "ruler", "counter"}),
    "NAdam": (lambda p: torch.optim.NAdam(p), {"moments", "ruler", "counter"}),
    "Adamax": (lambda p: torch.optim.Adamax(p), {"counter"}),
    "SGD": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), {"replay"}),
    "Adagrad": (lambda p: torch.optim.Adagrad(p), {"counter", "reach"}),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, momentum=0.9), {"counter", "reach", "replay"}),
    "Adadelta": (lambda p: torch.optim.Adadelta(p), {"counter"}),
    "Rprop": (lambda p: torch.optim.Rprop(p), {"counter"}),
    "ASGD": (lambda p: torch.optim.ASGD(p), {"counter"}),
    "Adafactor": (lambda p: torch.optim.Adafactor(p), {"counter"}),
}


@pytest.mark.parametrize("family", OPTIMIZERS)
def test_torchs_own_optimizers_are_told_apart(tmp_path: Path, family: str) -> None:
    make, laws = OPTIMIZERS[family]
    model = net()
    optimizer = trained(model, make(model.parameters()))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "o.pt")
    found = state(tmp_path / "o.pt").facts.optimizer
    assert (found.family, found.stored, found.laws) == (family, True, laws) and found.why


def test_plain_sgd_and_a_fresh_adamw_are_told_without_state(tmp_path: Path) -> None:
    model = net()
    for family in ("SGD", "AdamW"):
        made = getattr(torch.optim, family)(model.parameters(), lr=1e-2)
        torch.save({"model": model.state_dict(), "optimizer": made.state_dict()}, tmp_path / "o.pt")
        assert state(tmp_path / "o.pt").facts.optimizer.family == family
    torch.save({"model": model.state_dict()}, tmp_path / "none.pt")
    found = state(tmp_path / "none.pt").facts.optimizer
    assert (found.family, found.stored, found.laws) == ("unknown", False, frozenset())


ADAM = {"exp_avg", "exp_avg_sq", "step"}
BARE = {name: GROUP[name] for name in ("lr", "betas", "eps", "weight_decay")}


@pytest.mark.parametrize(
    ("fields", "words", "family", "laws"),
    [
        (BARE | {"kahan_sum": True, "weight_decouple": True}, ADAM, "unknown", set()),
        (BARE | {"weight_decouple": True, "fixed_decay": False, "rectify": True}, ADAM, "unknown", set()),
        (BARE | {"nus": (0.7, 1.0)}, ADAM, "QHAdam", set()),
        (BARE | {"grad_averaging": True, "max_grad_norm": 1.0, "bias_correction": True}, ADAM, "LAMB", set()),
        (BARE | {"decouple": True, "foreach": None, "maximize": False}, ADAM, "unknown", set()),
        (GROUP | {"caution": True}, ADAM, "unknown", set()),
        (GROUP | {"betas": (0.9, 0.99, 0.999)}, ADAM, "unknown", set()),
        (GROUP, ADAM | {"previous_grad"}, "unknown", set()),
        (BARE, ADAM, "Adam or like it", {"moments", "counter"}),
        ({}, ADAM, "Adam or like it", {"moments", "counter"}),
        (BARE | {"bias_correction": True, "step": 4}, {"exp_avg", "exp_avg_sq"}, "Adam", ALL_LAWS),
        (BARE | {"bias_correction": 0}, ADAM, "Adam", {"moments", "ruler", "counter"}),
        (BARE | {"correct_bias": True}, ADAM, "AdamW", {"moments", "reach", "ruler", "counter"}),
        (GROUP | {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 1.0}, ADAM, "Adam", ALL_LAWS),
        (GROUP | {"my_note": "backbone"}, ADAM, "Adam", ALL_LAWS),
        ({"lr": 1.0, "betas": (0.9, 0.99), "weight_decay": 0.0}, {"exp_avg"}, "Lion", {"reach", "replay"}),
        ({"lr": 1.0, "momentum": 0.95, "ns_steps": 5}, {"momentum"}, "Muon", set()),
        (BARE | {"weight_lr_power": 2.0, "r": 0.0, "k": 3}, {"z", "exp_avg_sq"}, "schedule-free", set()),
        (GROUP, {"exp_avg_sq_row", "exp_avg_sq_col", "step"}, "Adafactor", {"counter"}),
    ],
)
def test_fields_tell_adam_from_what_is_called_alike(fields: Any, words: Any, family: str, laws: Any) -> None:
    found = recognise(fields, words)
    assert (found.family, found.laws) == (family, laws), found.why


def test_the_reason_names_the_keys() -> None:
    why = recognise(BARE | {"kahan_sum": True}, ADAM).why
    assert why == "its param groups carry 'kahan_sum' and lack 'amsgrad'"


@pytest.mark.parametrize(("name", "laws"), [("adamw_torch_fused", ALL_LAWS), ("lamb", set()), ("adamw_8bit", set())])
def test_an_argument_tells_a_group_that_says_little(name: str, laws: Any) -> None:
    assert recognise(BARE, ADAM, name).laws == laws


def test_betas_that_are_given_make_it_adam(tmp_path: Path) -> None:
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}
    optimizer = {"state": {0: moments}, "param_groups": [BARE | {"params": [0]}]}
    torch.save({"model": {"fc.weight": torch.ones(2, 3)}, "optimizer": optimizer}, tmp_path / "bare.pt")
    ckpt = wb.open(str(tmp_path / "bare.pt"), cache=False)
    assert gather(ckpt).optimizer_of("fc.weight").laws == {"moments", "counter"}
    assert gather(ckpt, betas=(0.9, 0.95)).optimizer_of("fc.weight").laws == ALL_LAWS


def test_two_optimizers_in_one_file_are_judged_by_group(tmp_path: Path) -> None:
    """Muon for the matrix, AdamW for the vector: only what is AdamW's has laws."""
    muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "use_muon": True, "params": [0]}
    aux = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False, "params": [1]}
    held = {
        0: {"momentum_buffer": torch.ones(3, 2)},
        1: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": 4},
    }
    weights = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.ones(3)}
    torch.save(
        {"model": weights, "optimizer": {"state": held, "param_groups": [muon, aux]}, "step": 4}, tmp_path / "m.pt"
    )
    one = state(tmp_path / "m.pt")
    assert one.facts.optimizer.family == "Muon + AdamW" and one.facts.optimizer.laws == set()
    assert one.facts.optimizer_of("fc.weight").family == "Muon"
    assert one.facts.optimizer_of("fc.bias").laws == ALL_LAWS
    torch.save(
        {"model": weights, "optimizer": {"state": held, "param_groups": [muon, aux]}, "step": 5}, tmp_path / "n.pt"
    )
    updates = between(pair(one, state(tmp_path / "n.pt")))
    assert updates["fc.weight"].bars("floor") and updates["fc.weight"].bars("reach")
    assert not updates["fc.bias"].barred and "use_muon" in dict(updates["fc.weight"].barred)["reach"]


# ---- settings, counters, ties --------------------------------------------------------------------------------------


def test_every_field_of_groups_and_schedules_is_kept(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(decayed(model), lr=0.1, momentum=0.9, nesterov=True, maximize=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=50)
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
    torch.save(held, tmp_path / "s.pt")
    facts = state(tmp_path / "s.pt").facts
    for group, truth in zip(facts.groups, optimizer.param_groups, strict=True):
        assert group.settings == {name: value for name, value in truth.items() if name != "params"}
    assert facts.schedule.settings["total_steps"] == 50 and facts.schedule.settings["cycle_momentum"] is True
    assert facts.schedule.settings["base_lrs"] == tuple(schedule.base_lrs)
    assert facts.cycled and facts.beta_ends == (0.85, 0.95)


def test_settings_of_flattened_groups_include_maximize(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save as save_dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = net()
    optimizer = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, maximize=True))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=flat)
    save_dcp({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "d", no_dist=True)
    facts = state(tmp_path / "d").facts
    assert len(facts.groups) == 1 and len(facts.groups[0].params) == 7
    assert facts.groups[0].settings["maximize"] is True and facts.optimizer.family == "AdamW"


def test_each_counter_says_who_counts(tmp_path: Path) -> None:
    model = net()
    optimizer = trained(model, adamw(model), 4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    schedule.last_epoch = 6
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
    torch.save(content | {"step": 7}, tmp_path / "step-8.pt")
    counters = state(tmp_path / "step-8.pt").facts.counters
    assert {who: count for who, (count, _) in counters.items()} == {
        "trainer": 7,
        "optimizer": 4.0,
        "schedule": 6,
        "folder": 8,
    }
    assert counters["optimizer"][1] == "optimizer.state.0.step" and counters["schedule"][1] == "scheduler"


def test_tied_weights_are_one_storage(tmp_path: Path) -> None:
    one = torch.ones(6, 4)
    other = torch.arange(24.0)
    weights = {"embed.weight": one, "head.weight": one, "copy.weight": one.clone()}
    views = {"rows.weight": other.view(6, 4), "columns.weight": other.view(4, 6), "turned.weight": other.view(4, 6).t()}
    torch.save({"model": weights | views}, tmp_path / "tied.pt")
    assert state(tmp_path / "tied.pt").tied == {frozenset({"embed.weight", "head.weight"})}


# ---- how many updates ----------------------------------------------------------------------------------------------


def counted(path: Path, counts: dict[str, float | None], step: int) -> State:
    """Parameters with a counter each; ``None``: no state at all."""
    held = {
        at: {"step": torch.tensor(count), "exp_avg": torch.ones(at + 1, 2), "exp_avg_sq": torch.ones(at + 1, 2)}
        for at, count in enumerate(counts.values())
        if count is not None
    }
    weights = {name: torch.ones(at + 1, 2) for at, name in enumerate(counts)}
    group = GROUP | {"params": list(range(len(counts))), "param_names": list(counts)}
    torch.save({"model": weights, "optimizer": {"state": held, "param_groups": [group]}, "step": step}, path)
    return state(path)


def test_each_parameter_counts_its_own_updates(tmp_path: Path) -> None:
    a = counted(
        tmp_path / "a.pt", {"seen": 10.0, "some": 8.0, "none": 6.0, "fell": 9.0, "jumped": 9.0, "new": None}, 10
    )
    b = counted(
        tmp_path / "b.pt", {"seen": 15.0, "some": 11.0, "none": 6.0, "fell": 1.0, "jumped": 99.0, "new": 2.0}, 15
    )
    found = {fqn: (one.k, one.lag) for fqn, one in between(pair(a, b)).items()}
    assert found["seen"] == (5, 0) and found["some"] == (3, 2) and found["none"] == (0, 5)
    assert found["fell"] == (5, 13) and found["jumped"] == (5, -85)
    assert between(pair(a, b))["new"].before is None


def test_skipped_updates_are_no_updates(tmp_path: Path) -> None:
    """The trainer is 4 ahead in both: what the optimizer moved by is what was done."""
    a, b = counted(tmp_path / "a.pt", {"fc": 16.0}, 20), counted(tmp_path / "b.pt", {"fc": 21.0}, 25)
    assert [(one.k, one.lag) for one in between(pair(a, b)).values()] == [(5, 0)]


def test_micro_batches_are_no_updates(tmp_path: Path) -> None:
    a, b = counted(tmp_path / "a.pt", {"fc": 10.0}, 40), counted(tmp_path / "b.pt", {"fc": 15.0}, 60)
    assert [(one.k, one.lag) for one in between(pair(a, b)).values()] == [(5, 0)]


# ---- what anybody may have written ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [[HUGE], [2**63], [-1], [0, 0], ["0"], [None], [0.0], [True], [[0]], [], "all", [10**17], ["." * 100_000]],
    ids=str,
)
@pytest.mark.parametrize("lr", [NAN, HUGE, "fast", None, True, (1, 2), {"a": 1}], ids=lambda value: str(value)[:8])
def test_odd_groups_are_unknown_and_never_a_traceback(tmp_path: Path, params: Any, lr: Any) -> None:
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}
    group = GROUP | {"lr": lr, "weight_decay": lr, "base_momentum": lr, "params": params, "note": "x" * 10_000}
    optimizer = {"state": {0: moments, 1: moments}, "param_groups": [group]}
    weights = {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)}
    torch.save({"model": weights, "optimizer": optimizer, "step": 3}, tmp_path / "odd.pt")
    found = state(tmp_path / "odd.pt")
    assert set(found.numbered) == {"optimizer state 0", "optimizer state 1"}
    (group_found,) = found.facts.groups
    assert group_found.lr is None and group_found.weight_decay is None
    assert group_found.params in (None, (), ("optimizer state 0",)) or params == [10**17]
    assert found.facts.optimizer.stored and found.facts.beta_ends == () and found.facts.counters["optimizer"][0] == 3
    assert between(pair(found, found))


def test_huge_numbers_in_keys_are_no_numbers(tmp_path: Path) -> None:
    moments = {"step": 2, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    held = {10**30: moments, -5: moments, "x": moments, 10**17: moments}
    optimizer = {"state": held, "param_groups": [GROUP | {"params": [10**17]}]}
    torch.save({"model": {"a": torch.ones(3)}, "optimizer": optimizer}, tmp_path / "keys.pt")
    found = state(tmp_path / "keys.pt")
    assert found.numbered == {f"optimizer state {10**17}": 10**17}
    assert found.facts.steps.by_name[f"optimizer state {10**17}"] == 2


@pytest.mark.parametrize(
    ("fault", "cause"),
    {
        "ei72_codes_shifted": "B11",  # 8-bit state: codes, a table and scales make the values that are compared
        "y13_scales_of_one": "B11",
        "ij02_nadam_product": "B2",  # a product of factors below 1 that grew
        "sf02_no_schedule_file": "B1",  # neither a wrong step nor an old save: a warm-up begins with a rate of 0
        "svl01_adopt_counters": "B2",  # whose first update moves nothing
    }.items(),
)
def test_one_update_shows_state_that_began_anew_or_is_not_the_old_one(fault, cause):
    case = draw(EVERY[fault], 1)
    assert wb.doctor(case.before, case.next).causes[0].cause == cause
