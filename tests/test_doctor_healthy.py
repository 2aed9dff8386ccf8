"""Healthy runs of plain torch that no rule may blame; beside each the fault that it must not be taken for."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb

torch = pytest.importorskip("torch")
WORDS, WIDTH = 48, 24
Make = Callable[[Any], Any]


def model(tie: bool = False, share: bool = False, seed: int = 0) -> Any:
    """An embedding, two blocks and a head; the head tied, or the second block the first one."""
    torch.manual_seed(seed)
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 64), torch.nn.GELU(), torch.nn.Linear(64, WIDTH)
        )
        for _ in range(2)
    ]
    made = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(WORDS, WIDTH),
            "blocks": torch.nn.ModuleList([blocks[0], blocks[0] if share else blocks[1]]),
            "lm_head": torch.nn.Linear(WIDTH, WORDS, bias=False),
        }
    )
    if tie:
        made["lm_head"].weight = made["embed"].weight
    return made


def train(net: Any, optimizer: Any, first: int, last: int, schedule: Any = None) -> None:
    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, WORDS, (8, 13), generator=draw)
        hidden = net["embed"](tokens[:, :-1])
        for block in net["blocks"]:
            hidden = hidden + block(hidden)
        logits = net["lm_head"](hidden).reshape(-1, WORDS)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1) // 2).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def save(path: Path, net: Any, optimizer: Any, step: int, schedule: Any = None) -> Path:
    held = {"model": net.state_dict(), "step": step}
    if optimizer is not None:
        held["optimizer"] = optimizer.state_dict()
    if schedule is not None:
        held["scheduler"] = schedule.state_dict()
    torch.save(held, path)
    return path


def resumed(
    folder: Path,
    make: Make,
    *,
    k: int = 3,
    first: int = 20,
    schedule: Make | None = None,
    spoil: Make | None = None,
    **kind: bool,
) -> Any:
    """A run saved at ``first``, spoilt or not as a load might, and saved again ``k`` updates later."""
    net = model(**kind)
    optimizer = make(net.parameters())
    plan = schedule(optimizer) if schedule is not None else None
    train(net, optimizer, 0, first, plan)
    before = save(folder / f"step-{first}.pt", net, optimizer, first, plan)
    if spoil is not None:
        with torch.no_grad():
            spoil((net, optimizer))
    train(net, optimizer, first, first + k, plan)
    return wb.doctor(before, save(folder / f"step-{first + k}.pt", net, optimizer, first + k, plan))


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95))


def rules(found: Any, least: str = "warn") -> set[str]:
    grave = {"warn": ("warn", "error"), "error": ("error",)}[least]
    return {one.rule for one in found if one.severity in grave}


# ---- shared weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tie", "share"])
@pytest.mark.parametrize("make", [adamw, lambda p: torch.optim.SGD(p, lr=1e-2)], ids=["adamw", "sgd"])
def test_one_weight_of_two_names_is_no_layer_twice(tmp_path: Path, kind: str, make: Make) -> None:
    """torch.save keeps both names of one storage, the optimizer has one state."""
    assert "S14" not in rules(resumed(tmp_path, make, **{kind: True}))
    if make is adamw:
        assert resumed(tmp_path, make, **{kind: True}).exit_code == 0


def test_a_layer_twice_is_told_where_both_have_moments(tmp_path: Path) -> None:
    net = model()
    optimizer = adamw(net.parameters())
    train(net, optimizer, 0, 10)
    net["blocks"][1].load_state_dict(net["blocks"][0].state_dict())
    found = wb.doctor(save(tmp_path / "step-10.pt", net, optimizer, 10))
    assert "S14" in rules(found, "error") and found.exit_code == 2
    bare = wb.doctor(save(tmp_path / "bare.pt", net, None, 10))  # without moments nothing tells them from shared ones
    assert "S14" in rules(bare) and bare.exit_code == 1


def test_a_tied_pair_that_dcp_stores_twice_is_none(tmp_path: Path) -> None:
    """DCP writes each name's bytes; the optimizer's state is under one name or none of both is an error."""
    from torch.distributed.checkpoint import save as save_dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net = model(tie=True)
    optimizer = adamw(net.parameters())
    train(net, optimizer, 0, 10)
    weights, states = get_state_dict(net, optimizer)
    save_dcp({"model": weights, "optimizer": states, "step": 10}, checkpoint_id=tmp_path / "step-10", no_dist=True)
    assert wb.doctor(tmp_path / "step-10").exit_code == 0


# ---- other optimizers, betas that move -----------------------------------------------------------------------------


def forget(run: Any) -> None:
    """Moments and counters are a new optimizer's; the schedule and β go on."""
    for one in run[1].state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            one[name].zero_()


def rerolled(run: Any) -> None:
    """The weights were not loaded."""
    run[0].load_state_dict(model(seed=1).state_dict())


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=200)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_a_cycled_beta_is_no_lost_moment(tmp_path: Path, k: int) -> None:
    """OneCycleLR moves β1 at every update, and each group says between which ends. The change itself may be told."""
    found = resumed(tmp_path, adamw, k=k, first=40, schedule=one_cycle)
    assert not rules(found, "error") and rules(found) <= {"P16"}
    assert "state different betas" in found.not_checked["P04"]
    assert "P03" in found.checked and "P05" in found.checked  # β2 is one, and the reach has the least β1's K


@pytest.mark.parametrize(("spoil", "rule"), [(forget, "P03"), (rerolled, "P05")])
def test_with_a_cycled_beta_faults_are_still_told(tmp_path: Path, spoil: Make, rule: str) -> None:
    found = resumed(tmp_path, adamw, first=40, schedule=one_cycle, spoil=spoil)
    assert rule in rules(found)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ["NAdam", "Adamax"])
def test_another_adam_is_not_replayed(tmp_path: Path, name: str, k: int) -> None:
    found = resumed(tmp_path, lambda p: getattr(torch.optim, name)(p, lr=1e-3), k=k)
    assert found.exit_code == 0
    assert name in found.not_checked["P12"] and name in found.not_checked["P05"]


def test_what_another_adam_keeps_is_judged(tmp_path: Path) -> None:
    found = resumed(tmp_path, lambda p: torch.optim.NAdam(p, lr=1e-3, betas=(0.9, 0.95)), spoil=forget)
    assert {"P03", "P04"} <= rules(found, "error")


# ---- damaged numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1e12, 1e30, float("nan"), float("inf"), -3.0])
def test_a_damaged_counter_ends_no_check(tmp_path: Path, step: float) -> None:
    def damage(run: Any) -> None:
        for one in run[1].state.values():
            one["step"].fill_(step)

    net = model()
    optimizer = adamw(net.parameters())
    train(net, optimizer, 0, 20)
    before = save(tmp_path / "step-20.pt", net, optimizer, 20)
    train(net, optimizer, 20, 22)
    damage((net, optimizer))
    after = save(tmp_path / "step-22.pt", net, optimizer, 22)
    assert "P08" in wb.doctor(before, after).checked  # the weights are looked at all the same
    assert "S14" in wb.doctor(after, before).checked  # the damaged one first: it may be that k is not known


@pytest.mark.parametrize("betas", [(0.9, 0.0), (1.0, 0.95), (0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9)])
def test_betas_that_are_none_bound_nothing(betas: tuple[float, float]) -> None:
    from workbench.doctor.laws import bounds

    assert "betas" in (bounds.has_slack(betas, "float32") or "")
    assert bounds.bound(betas) == bounds.bound(betas, 3) == bounds.moved_by(betas, 1e-3, 3, 10) == float("inf")


def test_a_long_way_is_summed_in_no_time() -> None:
    from workbench.doctor.laws.bounds import bound, moved_by

    for step, k in ((10**12, 5), (10**30, 10**12), (0, 10**12)):
        least = 1e-3 * k * bound((0.9, 0.95)) ** 0.5
        assert least <= moved_by((0.9, 0.95), 1e-3, k, step) <= 1.01 * least
    near = 1 - 1e-9  # so slow that the sum is cut short: still no less than one by one
    assert moved_by((0.9, near), 1e-3, 1 << 22, 0) >= 1e-3 * (1 << 22)


# ---- optimizers without Adam's moments; weights without masters ------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=1e-1),
        lambda p: torch.optim.Adafactor(p, lr=1e-3),
    ],
    ids=["momentum", "plain", "adafactor"],
)
@pytest.mark.parametrize("k", [1, 3])
def test_only_adam_moves_all_alike(tmp_path: Path, make: Make, k: int) -> None:
    found = resumed(tmp_path, make, k=k)
    assert found.exit_code == 0 and not found.causes
    assert "P06" in found.not_applicable and "P06" not in found.not_checked


def test_without_moments_none_are_blamed(tmp_path: Path) -> None:
    found = resumed(tmp_path, lambda p: torch.optim.SGD(p, lr=1e-2), spoil=rerolled)
    assert "P08" in rules(found)
    assert not {one.cause for one in found.causes} & {"B3", "B4", "B5", "B6"}


def test_adam_may_still_move_one_parameter_too_far(tmp_path: Path) -> None:
    """Without a learning rate nothing is out of reach, and the size of a change is all that tells."""

    def shake(run: Any) -> None:
        run[0]["blocks"][0][3].bias.add_(0.5)

    net = model()
    optimizer = adamw(net.parameters())
    paths = []
    for first, last in ((0, 20), (20, 23)):
        train(net, optimizer, first, last)
        if last == 23:
            with torch.no_grad():
                shake((net, optimizer))
        held = optimizer.state_dict()
        for group in held["param_groups"]:
            del group["lr"]
        paths.append(tmp_path / f"step-{last}.pt")
        torch.save({"model": net.state_dict(), "optimizer": held, "step": last}, paths[-1])
    assert "P06" in rules(wb.doctor(*paths))


def test_weights_that_were_not_loaded_are_not_called_masters(tmp_path: Path) -> None:
    found = resumed(tmp_path, adamw, spoil=rerolled)
    assert "P05" in rules(found) and found.causes[0].cause in ("A1", "A2")
    assert "masters" not in found.verdict


def test_an_update_of_a_fused_kernel_on_a_gpu_breaks_no_law(tmp_path: Path) -> None:
    """Real saves, one update apart, of `AdamW(fused=True)` on an H100: the kernel holds the betas in float32."""
    with zipfile.ZipFile(Path(__file__).parent / "fixtures" / "fused_cuda.zip") as archive:
        archive.extractall(tmp_path)
    before, after = (next((tmp_path / side).iterdir()) for side in ("before", "after"))
    report = wb.doctor(before, after)
    assert not report.causes and report.verdict.startswith("No fault found"), report
    content = torch.load(before, map_location="cpu", weights_only=False)
    assert content["optimizer_states"][0]["param_groups"][0]["fused"]
    ckpt = wb.open(before)
    for name, tensor in content["state_dict"].items():
        assert torch.equal(ckpt[f"state_dict.{name}"].torch(), tensor)
