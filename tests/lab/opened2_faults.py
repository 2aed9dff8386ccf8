"""Faults of the lab's own trainer of the second sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.lab import save_deepspeed
from tests.lab.changes import (
    ALIKE,
    ARGUED,
    EXTRA,
    FLAT,
    MOMENTS,
    WEIGHTS,
    Restore,
    both,
    ends,
    fields,
    layered,
    mapped,
    matrices,
    moved,
    of_layers,
    set_weights,
    steps,
    told,
    vectors,
    with_,
)
from tests.lab.config import Config
from tests.lab.corruption import flip
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.loader_faults import drop_optimizer, masters_from_weights, swap_gate_up
from tests.lab.model import ADAPTED, LORA_SCALE, is_norm
from tests.lab.split import axis_of, halves
from tests.lab.state import Named, State
from tests.lab.trials import shuffled

__all__ = ["OPENED2_FAULTS"]

Tensor = torch.Tensor
Damage = Callable[[Path, State, Lab], State | None]

TABLES = ends("embed_tokens", "lm_head")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CUT = ends("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# ---- blocks ----------------------------------------------------------------------------------------------------------


def drawn(make: Callable[[Any], Restore], *choices: Any) -> Restore:
    """What ``make`` makes of one of these; of a layer's number, where there are none."""

    def restore(state: State, lab: Lab) -> State:
        return make(lab.rng.choice(choices or range(state.config.layers)))(state, lab)

    return restore


def one_of(pick: Callable[[str], bool], change: Callable[[Tensor, Lab], Tensor], *where: str) -> Restore:
    """One tensor of those that are picked, in each of these fields; ``updated`` is the masters or the weights."""

    def restore(state: State, lab: Lab) -> State:
        name = lab.rng.choice(sorted(filter(pick, state.trained())))
        for found in fields(state, where):
            found[name] = change(found[name].clone(), lab)
        return state

    return restore


def in_weights(pick: Callable[[str], bool], change: Callable[[Tensor, Lab], Tensor]) -> Restore:
    """One weight and its master, alike."""

    def restore(state: State, lab: Lab) -> State:
        name = lab.rng.choice(sorted(filter(pick, state.updated)))
        return set_weights(state, {name: change(state.updated[name].float().clone(), lab)})

    return restore


def exchanged(one: str, other: str, pick: Callable[[str], bool], where: Sequence[str] = ALIKE) -> Restore:
    """Tensors with these words in their names change places."""
    return moved(lambda name, c: name.replace(one, "\0").replace(other, one).replace("\0", other), pick, where)


def within(pick: Callable[[str], bool], *words: str) -> Callable[[str], bool]:
    return lambda name: pick(name) and any(word in name for word in words)


def on_second(part: Restore) -> Callable[[State, Lab], State]:
    """For `Fault.second`: rank 1 alone."""
    return lambda state, lab: part(state.clone(), lab)


def turned(number: int, layers: int) -> int:
    return (number + 1) % layers


def same(state: State, lab: Lab) -> State:
    return state


# ---- DeepSpeed's files -----------------------------------------------------------------------------------------------


def partition(path: Path, rank: int) -> Path:
    return path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def edited(path: Path, rank: int, change: Callable[[Named, int], None]) -> None:
    """Change a rank's flat lines in its file: fp32, exp_avg and exp_avg_sq, and the step, of each group by number."""
    content = torch.load(partition(path, rank), weights_only=False)  # the lab's own
    found = content["optimizer_state_dict"]
    fp32, state = found["single_partition_of_fp32_groups"], found["base_optimizer_state"]["state"]
    for number in range(len(fp32)):
        lines = {"fp32": fp32[number]} | state[number]
        change(lines, number)
        fp32[number] = lines.pop("fp32")
        state[number] = lines
    torch.save(content, partition(path, rank))


def joined(path: Path, state: State) -> State:
    """What DeepSpeed loads: partitions in the order of the ranks' numbers, each parameter where its line has it."""
    found = state.clone()
    ranks: list[list[Named]] = [[], []]
    for rank, groups in enumerate(ranks):
        edited(path, rank, lambda lines, number, groups=groups: groups.append(dict(lines)))
    for number, (_, names) in enumerate(state.groups()):
        parts = [groups[number] for groups in ranks]
        for where, line in {"masters": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.items():
            whole, at = torch.cat([part[line] for part in parts]), 0
            for name in names:
                shape = state.params[name].shape
                getattr(found, where)[name] = whole[at : at + shape.numel()].reshape(shape).clone()
                found.step[name] = float(parts[at // len(parts[0][line])]["step"])
                at += shape.numel()
    return found


def lines_of_one(change: Callable[[Named, int, Lab], None]) -> Damage:
    """The lines of a rank that is drawn."""

    def damage(path: Path, state: State, lab: Lab) -> State:
        edited(path, lab.rng.randrange(2), lambda lines, number: change(lines, number, lab))
        return joined(path, state)

    return damage


def files_exchanged(path: Path, state: State, lab: Lab) -> State:
    first, second = (partition(path, rank).read_bytes() for rank in range(2))
    partition(path, 0).write_bytes(second)
    partition(path, 1).write_bytes(first)
    return joined(path, state)


def file_copied(path: Path, state: State, lab: Lab) -> State:
    rank = lab.rng.randrange(2)
    shutil.copyfile(partition(path, rank), partition(path, 1 - rank))
    return joined(path, state)


def put_from(older: State, file: Path) -> None:
    """A file of another save in the place of this one's."""
    with tempfile.TemporaryDirectory() as work:
        shutil.copyfile(save_deepspeed.save(Path(work), older) / file.name, file)


def older_partition(path: Path, state: State, lab: Lab) -> State:
    put_from(lab.run.recent, partition(path, lab.rng.randrange(2)))
    return joined(path, state)


def older_module(path: Path, state: State, lab: Lab) -> State:
    older = lab.run.recent
    put_from(older, path / "mp_rank_00_model_states.pt")
    return replace(state, params=older.params, buffers=older.buffers, trainer=older.trainer)


def averaged_partitions(path: Path, state: State, lab: Lab) -> State:
    found: list[Named] = []
    for rank in range(2):
        edited(path, rank, lambda lines, number: found.append(dict(lines)))
    groups = len(found) // 2
    for rank in range(2):
        edited(path, rank, lambda lines, n: lines.update(fp32=(found[n]["fp32"] + found[groups + n]["fp32"]) / 2))
    return joined(path, state)


def missing_file(path: Path, state: State, lab: Lab) -> None:
    files = [file for file in path.rglob("*.pt") if "model_states" not in file.name]
    lab.rng.choice(sorted(files)).unlink()


def shortened(path: Path, state: State, lab: Lab) -> None:
    file = lab.rng.choice(sorted(file for file in path.rglob("*.pt")))
    os.truncate(file, int(file.stat().st_size * lab.rng.uniform(0.05, 0.95)))


def second_moment_gone(lines: Named, number: int, lab: Lab) -> None:
    lines["exp_avg_sq"] = torch.zeros_like(lines["exp_avg_sq"])


def begins_late(lines: Named, number: int, lab: Lab) -> None:
    by = lab.rng.randrange(1, 40)
    for what in ("fp32", "exp_avg", "exp_avg_sq"):
        if len(lines[what]) > 4 * by:
            lines[what] = torch.cat([lines[what][by:], torch.zeros(by)])


def counter_new(lines: Named, number: int, lab: Lab) -> None:
    lines["step"] = torch.zeros_like(lines["step"])


def tail_unwritten(lines: Named, number: int, lab: Lab) -> None:
    if number == 0:
        lines["fp32"] = lines["fp32"].clone()
        lines["fp32"][int(len(lines["fp32"]) * lab.rng.uniform(0.6, 0.9)) :] = 0


def block_of_nan(lines: Named, number: int, lab: Lab) -> None:
    if number == 0:
        at = lab.rng.randrange(len(lines["exp_avg_sq"]) // 2)
        lines["exp_avg_sq"] = lines["exp_avg_sq"].clone()
        lines["exp_avg_sq"][at : at + 16] = math.nan


def first_moment_turned(lines: Named, number: int, lab: Lab) -> None:
    if number == 0:
        data = lines["exp_avg"].contiguous().view(torch.uint8).view(-1, 4).flip(1).contiguous()
        lines["exp_avg"] = data.view(torch.float32).view(-1)


def reordered(group: int, order: Callable[[list[str]], list[str]]) -> Restore:
    """Flat lines of a group written in another order of its parameters, and read in the model's."""

    def restore(state: State, lab: Lab) -> State:
        names = state.groups()[group][1]
        for found in fields(state, ("masters", *MOMENTS)):
            line = torch.cat([found[name].reshape(-1) for name in order(names)])
            parts = line.split([found[name].numel() for name in names])
            found |= {name: part.view(found[name].shape).clone() for name, part in zip(names, parts, strict=True)}
        return state

    return restore


def by_blocks(tensor: Tensor) -> Tensor:
    """Through eight bits with a scale for every 256 elements."""
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % 256)).view(-1, 256)
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return ((flat / scale).round() * scale).reshape(-1)[: tensor.numel()].view(tensor.shape)


# ---- ranks of Megatron -----------------------------------------------------------------------------------------------


def first_ranks_moments(state: State, lab: Lab) -> State:
    for found in fields(state, MOMENTS):
        for name in found:
            if (axis := axis_of(name)) is not None:
                found[name] = torch.cat([halves(name, found[name])[0]] * 2, axis)
    return state


def grouped_qkv(state: State, lab: Lab) -> State:
    """Rows of [Q; K; V] read as if they were by query group."""
    groups, width = state.config.groups, state.config.hidden
    for found in fields(state, ALIKE):
        for name in filter(ends("q_proj"), list(found)):
            names = [name.replace("q_proj", f"{side}_proj") for side in "qkv"]
            sizes = [len(found[side]) // groups for side in names]
            rows = torch.cat([found[side] for side in names]).view(groups, sum(sizes), width).split(sizes, 1)
            found |= {side: part.reshape(-1, width).clone() for side, part in zip(names, rows, strict=True)}
    return state


def drifted_momentum(state: State, lab: Lab) -> State:
    names = lab.rng.sample([name for name in state.exp_avg if is_norm(name)], 2)
    drifted = {name: state.exp_avg[name] * (1 + 2.0 ** -lab.rng.randrange(6, 16)) for name in names}
    return replace(state, exp_avg=state.exp_avg | drifted)


def later_range(table: Tensor, by: int) -> Tensor:
    """Rank 1's rows of the vocabulary placed further on; the last ones come to its begin."""
    first, second = table.chunk(2)
    return torch.cat([first, second.roll(by, 0)])


def local_numbers(state: State, lab: Lab) -> State:
    """Each of two expert-parallel ranks numbers its experts from 0."""
    half = state.config.experts // 2

    def source(name: str, config: Config) -> str:
        head, _, rest = name.partition(".experts.")
        number, _, side = rest.partition(".")
        return f"{head}.experts.{int(number) % half}.{side}"

    return moved(source, lambda name: ".experts." in name)(state, lab)


def zero_centred(state: State, lab: Lab) -> State:
    by = lab.rng.choice([1.0, -1.0])
    return set_weights(state, {name: w.float() + by for name, w in state.updated.items() if is_norm(name)})


def transposed_squares(number: int) -> Restore:
    def turn(tensor: Tensor) -> Tensor:
        return tensor.T

    return mapped(turn, within(ends("q_proj", "o_proj"), f".layers.{number}."))


def older_head(state: State, lab: Lab) -> State:
    """A head of its own beside the tied embedding: the table of the save before, with new state."""
    state = head_without_state(state, lab)
    return set_weights(state, {HEAD: lab.run.recent.updated[EMBEDDING].float()})


def head_without_state(state: State, lab: Lab) -> State:
    for found in fields(state, WEIGHTS):
        found[HEAD] = found[EMBEDDING].clone()
    for found in fields(state, MOMENTS):
        found[HEAD] = torch.zeros_like(found[EMBEDDING])
    state.step[HEAD] = 0.0
    return state


def older_layer(state: State, lab: Lab) -> State:
    older, pick = lab.run.stale, of_layers(lab.rng.randrange(state.config.layers))
    for where in ALIKE:
        held = getattr(state, where)
        held |= {name: getattr(older, where)[name] for name in filter(pick, held)}
    return state


def stuck_bit(tensor: Tensor, lab: Lab) -> Tensor:
    """One bit of every 64th element is set, as by a cell of memory that is worn."""
    width = 8 * tensor.element_size()
    bits = tensor.contiguous().view({16: torch.int16, 32: torch.int32}[width]).view(-1)
    bits[lab.rng.randrange(64) :: 64] |= 1 << (lab.rng.randrange(17, 21) - (16 if width == 16 else 0))
    return bits.view(tensor.dtype).view(tensor.shape)


# ---- the optimizer's state -------------------------------------------------------------------------------------------


def scaled_moments(factor: float) -> Restore:
    """As gradients that were not unscaled leave them."""
    return both(
        mapped(lambda t: t * factor, where=("exp_avg",)), mapped(lambda t: t * factor**2, where=("exp_avg_sq",))
    )


def dealt_rows(tensor: Tensor) -> Tensor:
    """Rows dealt to four ranks in turn, joined rank by rank."""
    return torch.cat([tensor[rank::4] for rank in range(4)])


def previous_momentum(state: State, lab: Lab) -> State:
    return replace(state, exp_avg=lab.run.previous.exp_avg)


def previous_moments(state: State, lab: Lab) -> State:
    return replace(state, exp_avg=lab.run.previous.exp_avg, exp_avg_sq=lab.run.previous.exp_avg_sq)


def random_masters(state: State, lab: Lab) -> State:
    return replace(state, masters=lab.run.fresh().masters)


def previous_masters(state: State, lab: Lab) -> State:
    return replace(state, masters=lab.run.previous.masters)


# ---- masters ---------------------------------------------------------------------------------------------------------


def through_tf32(tensor: Tensor) -> Tensor:
    return (tensor.contiguous().view(torch.int32) & -8192).view(torch.float32)


def dithered(state: State, lab: Lab) -> State:
    """Masters made anew from bf16, with low bits by chance: they round to the weights."""
    made = torch.Generator().manual_seed(lab.rng.randrange(1 << 30))
    for name, weight in state.params.items():
        bits = weight.float().contiguous().view(torch.int32)
        low = torch.randint(0, 1 << 15, weight.shape, generator=made, dtype=torch.int32)
        state.masters[name] = (bits | low).view(torch.float32)
    return state


def through_fp8(tensor: Tensor) -> Tensor:
    scale = 448 / tensor.float().abs().max()
    return (tensor.float() * scale).to(torch.float8_e4m3fn).float() / scale


def masters_left_out(path: Path, state: State, lab: Lab) -> State:
    """A file that lacks half of its masters; the loader makes them of the weights."""
    content = torch.load(path, weights_only=False)  # the lab's own
    for name in lab.rng.sample(sorted(state.masters), len(state.masters) // 2):
        del content["master_weights"][name]
        state.masters[name] = state.params[name].float()
    torch.save(content, path)
    return state


# ---- layouts ---------------------------------------------------------------------------------------------------------


def heads_of_output(state: State, lab: Lab) -> State:
    c = state.config
    order = shuffled(c.heads, lab)
    return mapped(lambda t: t.view(c.hidden, c.heads, -1)[:, order].reshape(t.shape), ends("o_proj"))(state, lab)


def to_halves(state: State, lab: Lab) -> State:
    """Rows of q from interleaved pairs to halves, though they were halves before; k stays."""
    width = state.config.head_dim
    order = torch.arange(width).view(-1, 2).T.reshape(-1)

    def permute(tensor: Tensor) -> Tensor:
        return tensor.view(-1, width, tensor.shape[1])[:, order].reshape(tensor.shape)

    return mapped(permute, ends("q_proj"))(state, lab)


def four_naive(number: int) -> Restore:
    """[gate; up] of four ranks put one under the other, in one layer's weights."""

    def restore(state: State, lab: Lab) -> State:
        for found in fields(state, WEIGHTS):
            for name in filter(within(ends("gate_proj"), f".layers.{number}."), list(found)):
                other = name.replace("gate_proj", "up_proj")
                pairs = zip(found[name].chunk(4), found[other].chunk(4), strict=True)
                rows = torch.cat([part for pair in pairs for part in pair])
                found[name], found[other] = (half.clone() for half in rows.chunk(2))
        return state

    return restore


def shifted_layer(state: State, lab: Lab) -> State:
    """A layer's flat parameter read a few elements too early."""
    number, by = lab.rng.randrange(state.config.layers), lab.rng.randrange(1, 48)
    for found in fields(state, ALIKE):
        names = list(filter(of_layers(number), found))
        line = torch.cat([found[name].reshape(-1) for name in names]).roll(by)
        line[:by] = 0
        parts = line.split([found[name].numel() for name in names])
        found |= {name: part.view(found[name].shape).clone() for name, part in zip(names, parts, strict=True)}
    return state


def rest_rows_zero(state: State, lab: Lab) -> State:
    """Rows beyond an even share of the ranks were written by none."""
    for found in fields(state, ALIKE):
        for name in filter(ends("gate_proj", "up_proj"), found):
            rows = len(found[name])
            world = next(world for world in (7, 5, 3, 11) if rows % world)
            found[name] = found[name].clone()
            found[name][rows // world * world :] = 0
    return state


def crossed_experts(number: int) -> Restore:
    """The down_proj of a layer's experts in another order, the rest of them right."""

    def source(name: str, config: Config) -> str:
        head, _, rest = name.partition(".experts.")
        expert, _, side = rest.partition(".")
        return f"{head}.experts.{(int(expert) + 1) % config.experts}.{side}"

    return moved(source, within(ends("down_proj"), f".layers.{number}.mlp.experts."))


def padding_first(state: State, lab: Lab) -> State:
    return mapped(lambda t: t.roll(state.config.padded - state.config.vocab, 0), TABLES)(state, lab)


# ---- vocabulary, averages, adapters ----------------------------------------------------------------------------------


def rows_zero(state: State, lab: Lab) -> State:
    count = lab.rng.randrange(4, state.config.vocab // 4)
    rows = slice(state.config.vocab - count, state.config.vocab)
    return in_tables(state, lambda table: table.index_fill_(0, torch.arange(rows.start, rows.stop), 0.0))


def rows_of_unknown(state: State, lab: Lab) -> State:
    """Tokens that another tokenizer does not know have the row of one that stands for them."""
    first, *others = lab.rng.sample(range(state.config.vocab), 9)

    def change(table: Tensor) -> Tensor:
        table[others] = table[first].clone()
        return table

    return in_tables(state, change)


def in_tables(state: State, change: Callable[[Tensor], Tensor]) -> State:
    return set_weights(state, {n: change(w.float().clone()) for n, w in state.updated.items() if TABLES(n)})


def specials_first(state: State, lab: Lab) -> State:
    vocab, count = state.config.vocab, lab.rng.randrange(2, 12)
    order = [*range(vocab - count, vocab), *range(vocab - count), *range(vocab, state.config.padded)]
    return mapped(lambda table: table[order], TABLES)(state, lab)


def padding_reborn(state: State, lab: Lab) -> State:
    made = torch.Generator().manual_seed(lab.rng.randrange(1 << 30))

    def change(table: Tensor) -> Tensor:
        rest = table[state.config.vocab :]
        rest.copy_(torch.randn(rest.shape, generator=made) * 0.02)
        return table

    return in_tables(state, change)


def partly_averaged(state: State, lab: Lab) -> State:
    names = lab.rng.sample(sorted(state.ema), len(state.ema) // 2)
    return set_weights(state, {name: state.ema[name].clone() for name in names})


def older_average(state: State, lab: Lab) -> State:
    return replace(state, ema=lab.run.stale.ema)


def unmerged(state: State, lab: Lab) -> State:
    """Adapters taken out of a base that never had them."""
    for name in [name for name in state.params if name.endswith(tuple(f"{side}.weight" for side in ADAPTED))]:
        stem = name.removesuffix("weight")
        a, b = state.params[f"{stem}lora_A.weight"].float(), state.params[f"{stem}lora_B.weight"].float()
        state.params[name] = (state.params[name].float() - LORA_SCALE * b @ a).to(state.params[name].dtype)
    return state


def lower_rank(state: State, lab: Lab) -> State:
    """Adapters cut to half of their rank, and filled with zeros."""
    changed = {}
    for name in [name for name in state.updated if "lora_" in name]:
        tensor, rank = state.updated[name].float().clone(), state.config.lora
        tensor.narrow(int("lora_B" in name), rank // 2, rank - rank // 2).zero_()
        changed[name] = tensor
    return set_weights(state, changed)


# ---- values ----------------------------------------------------------------------------------------------------------


def sign_of_one(tensor: Tensor, lab: Lab) -> Tensor:
    largest = tensor.abs().flatten().topk(tensor.numel() // 4).indices.tolist()
    return flip(tensor, lab.rng.choice(largest), 0)


def never_filled(tensor: Tensor, lab: Lab) -> Tensor:
    """Memory as it was found."""
    made = torch.Generator().manual_seed(lab.rng.randrange(1 << 30))
    found = torch.randint(-(1 << 31), 1 << 31, tensor.shape, generator=made).int()
    return found.view(torch.float32)


def infinite(tensor: Tensor, lab: Lab) -> Tensor:
    tensor.view(-1)[lab.rng.randrange(tensor.numel())] = math.inf
    return tensor


def torn_page(path: Path, state: State, lab: Lab) -> State:
    """4 KiB within a tensor of the file are those of the save before."""
    name = lab.rng.choice([name for name in state.exp_avg_sq if ends("up_proj", "gate_proj")(name)])
    now, old = (
        one.exp_avg_sq[name].contiguous().view(torch.uint8).numpy().tobytes() for one in (state, lab.run.recent)
    )
    content = path.read_bytes()
    at, start = content.find(now), len(now) // 4096 // 2 * 4096
    assert at >= 0
    changed = now[:start] + old[start : start + 4096] + now[start + 4096 :]
    path.write_bytes(content[:at] + changed + content[at + len(now) :])
    state.exp_avg_sq[name] = torch.frombuffer(bytearray(changed), dtype=torch.float32).view(state.params[name].shape)
    return state


# ---- savers ----------------------------------------------------------------------------------------------------------


def without_optimizer(resumed: State, later: State) -> State:
    return replace(later.clone(), exp_avg={}, exp_avg_sq={}, step={})


def one_moment_twice(resumed: State, later: State) -> State:
    return replace(later, exp_avg_sq={name: tensor.clone() for name, tensor in later.exp_avg.items()})


def through_fp16(resumed: State, later: State) -> State:
    return replace(later, params={name: w.half().float() for name, w in later.params.items()})


def average_for_weights(resumed: State, later: State) -> State:
    return replace(later, params={name: later.ema[name].clone() for name in later.params})


def step_read_late(resumed: State, later: State) -> State:
    return later.told(step=later.trainer.step + 5)


# ---- runs ------------------------------------------------------------------------------------------------------------


def _expert(config: Config) -> Config:
    return config.but(experts=4)


def _grouped(config: Config) -> Config:
    return config.but(heads=4, groups=2, hidden=config.hidden // config.heads * 4)


def _spare(config: Config) -> Config:
    return config.but(padded=config.padded + 16)


def _several(config: Config) -> Config:
    return config.but(groups=max(2, config.groups))


def _without_copies(config: Config, format: str) -> bool:
    return config.precision != "mixed"


AFTER = seen("echo next early")
LOUD = seen("alone echo next early")
SOON = seen("alone echo next")
LATER = seen("next early")
LORA = with_(lora=4, precision="fp32")
WITH_EMA: Any = {"needs": with_(ema=True), "formats": EXTRA}
WITH_LORA: Any = {"needs": LORA, "formats": EXTRA}
ZERO: Any = {"needs": masters, "formats": ("deepspeed",)}
TP: Any = {"needs": masters, "formats": ("megatron",)}

OPENED2_ZERO = [
    Fault("x01_files_exchanged", "E13", "files of two ranks under each other's names", LOUD, damage=files_exchanged,
          also=("E1", "E7", "E8", "D2", "B5"), why="parts of flat lines in another order", **ZERO),
    Fault("x02_file_copied", "E8", "one rank's file stands for the other's as well", LOUD, damage=file_copied,
          also=("E1", "E7", "E13", "D2", "G6", "G10", "B5"), why="a part of a flat line in another's place", **ZERO),
    Fault("x03_file_older", "G6", "one rank's file is of the save before", LOUD, damage=older_partition,
          also=("C9", "B2", "D2"), why="files of two saves; its counter says so", **ZERO),
    Fault("x04_second_moment_gone", "B4", "one rank's exp_avg_sq is zero", LOUD,
          damage=lines_of_one(second_moment_gone), also=("B1", "B3", "B6", "G5"), why="a part of the state is lost",
          **ZERO),
    Fault("x05_begins_late", "E7", "one rank's lines begin some elements late", LOUD, damage=lines_of_one(begins_late),
          also=("E13", "D2", "B5", "E8"), why="an offset within flat lines", **ZERO),
    Fault("x06_masters_of_one_rank", "D1", "one rank's masters made anew from bf16", SOON,
          second=on_second(masters_from_weights), **ZERO),
    Fault("x07_counters_of_one_rank", "B2", "one rank's counters begin at 0", LOUD, damage=lines_of_one(counter_new),
          also=("G6", "C9"), why="counters disagree, by rank", **ZERO),
    Fault("x08_moments_in_blocks", "D4", "moments went through eight bits, block by block", LOUD,
          mapped(by_blocks, where=MOMENTS), also=("B4", "B6", "B11"),
          why="rounding, by which small second moments vanish", **ZERO),
    Fault("x09_sorted_names", "E13", "flat lines in the order of the parameters' names", LOUD, reordered(0, sorted),
          also=("E7", "B5", "D2"), why="a flat line cut in another order", **ZERO),
    Fault("x10_module_older", "G6", "the file of the weights is of the save before", LOUD, damage=older_module,
          also=("D3", "C9"), why="files of two saves", **ZERO),
    Fault("x11_tail_unwritten", "G5", "the end of one rank's masters is zero", LOUD,
          damage=lines_of_one(tail_unwritten), also=("G4", "D2"), why="zeros where nothing was written", **ZERO),
    Fault("x12_block_of_nan", "G1", "sixteen second moments are NaN", LOUD, damage=lines_of_one(block_of_nan),
          also=("G3", "G9"), why="numbers that are none, in a second moment", **ZERO),
    Fault("x13_schedule_older", "G6", "the schedule's position is that of the save before", LOUD,
          told(lambda s: {"scheduler": s.trainer.scheduler - 20}), also=("C1", "C2", "C3", "C9"),
          why="a position behind the step's", formats=("deepspeed",)),
    Fault("x14_moments_behind", "G6", "one rank's moments are an update behind", AFTER,
          second=on_second(previous_moments), also=("B6", "E13"), why="parts of two steps", **ZERO),
    Fault("x15_masters_random", "D2", "one rank's masters are as initialised", LOUD, second=on_second(random_masters),
          also=("A2", "G6"), why="masters that were not loaded", **ZERO),
    Fault("x16_accumulated_sum", "C10", "gradients of sixteen micro-batches added, not averaged", LATER,
          told(lambda s: {"silent": (("gradient", 16.0),)}), also=("B10", "D8", "H1", "H3", "H4", "G9"),
          needs=with_(clip=0.0), formats=("deepspeed",), why="second moments grow; larger gradients do the same"),
    Fault("x17_adamw_for_adam", "H1", "AdamW where Adam was", AFTER,
          lambda state, lab: state.declared(optimizer="adamw"), needs=with_(optimizer="adam", weight_decay=0.1),
          also=("B7", "C5"), formats=("deepspeed",), why="weights decay otherwise"),
    Fault("x18_file_missing", "G8", "one rank's file is not there", seen("alone echo"), damage=missing_file,
          also=("G4",), why="a save that was not completed", formats=("deepspeed",)),
    Fault("x19_file_short", "G4", "a file ends early", seen("alone echo"), damage=shortened, also=("G8",),
          why="a save that was not completed", formats=("deepspeed",)),
    Fault("x20_vectors_in_other_order", "E13", "the flat line of the vectors begins with the last norm", LOUD,
          reordered(1, lambda names: [names[-1], *names[:-1]]), also=("E7", "B5", "D2", "E9"),
          why="a flat line cut in another order, by whole parameters", **ZERO),
    Fault("x21_bytes_turned", "G1", "one rank's exp_avg has its bytes in the other order", LOUD,
          damage=lines_of_one(first_moment_turned), also=("G2", "G6", "G10", "G9", "B6"),
          why="bytes that are not the stored ones", **ZERO),
    Fault("x22_partitions_averaged", "E12", "each rank's masters are the mean of both ranks'", LOUD,
          damage=averaged_partitions, also=("E1", "E8", "D2", "G6"), why="parts taken for copies", **ZERO),
]  # fmt: skip

OPENED2_TP = [
    Fault("x31_moments_of_first_rank", "E8", "both ranks have rank 0's moments", LOUD,
          second=lambda s, lab: first_ranks_moments(s.clone(), lab), also=("E13", "E1", "B5", "G6", "G10"),
          why="a part in another's place", formats=("megatron",)),
    Fault("x32_rows_grouped", "E4", "[Q; K; V] read as rows by query group", AFTER, grouped_qkv, also=("E6", "E1"),
          needs=_several, why="fused rows in another order", formats=("megatron",)),
    Fault("x33_gated_on_one_rank", "E3", "gate and up exchanged on rank 1", AFTER, second=on_second(swap_gate_up),
          also=("E2", "E1"), why="a rank's half of both is in the other's place", formats=("megatron",)),
    Fault("x34_momentum_of_replicas", "F1", "two norms' exp_avg differ between the ranks", seen("alone echo"),
          second=drifted_momentum, also=("G6",), why="copies that should be one", formats=("megatron",)),
    Fault("x35_random_shared", "C8", "both ranks have rank 0's random state", AFTER,
          told(lambda s: {"shared_random": True}), formats=("megatron",)),
    Fault("x36_masters_of_vectors", "D1", "the norms' masters made anew from bf16", SOON,
          mapped(lambda t: t.bfloat16().float(), vectors, ("masters",)), **TP),
    Fault("x37_chunks_in_turn", "E9", "four layers of two virtual stages in the order 0 2 1 3", AFTER,
          moved(layered(lambda n, count: (0, 2, 1, 3)[n])), needs=with_(layers=4), formats=("megatron",)),
    Fault("x38_attention_turned", "E9", "each layer has the next one's attention", AFTER,
          moved(layered(turned), lambda name: "self_attn" in name), formats=("megatron",)),
    Fault("x39_range_later", "E8", "rank 1's rows of the vocabulary begin later", LOUD,
          drawn(lambda by: mapped(lambda t: later_range(t, by), TABLES), 1, 2, 3, 5), also=("F7", "E7", "E11", "E1"),
          why="rows of one rank moved, trained ones among the padding", needs=_spare, formats=("megatron",)),
    Fault("x40_local_numbers", "E10", "experts numbered from 0 on each rank", LOUD, local_numbers, also=("E9",),
          needs=_expert, why="whole experts twice", formats=("megatron",)),
    Fault("x41_samples_older", "C6", "consumed samples are those of the save before: its data comes again", LOUD,
          told(lambda s: {"data_index": s.trainer.data_index - 20, "loader": s.trainer.loader - 20,
                          "samples": s.trainer.samples - 20 * s.config.batch}),
          also=("C7", "C9", "G6"), why="a position behind the step's", formats=("megatron",)),
    Fault("x42_other_batch_counted", "C3", "the schedule's position is 1.5 times the step", LOUD,
          told(lambda s: {"scheduler": s.trainer.scheduler * 3 // 2}), also=("C1", "C2", "C9"),
          why="a position ahead of the step's", formats=("megatron",)),
    Fault("x43_state_of_next_mlp", "B5", "moments of each down_proj are the next layer's", AFTER,
          moved(layered(turned), ends("down_proj"), MOMENTS), also=("E13", "E9"), why="state of other parameters",
          formats=("megatron",)),
    Fault("x44_masters_behind", "D2", "one rank's masters are an update behind", SOON,
          second=on_second(previous_masters), also=("G6", "D3"), why="parts of two steps", **TP),
    Fault("x45_optimizer_of_one_rank", "B1", "one rank's optimizer is new", LOUD, second=on_second(drop_optimizer),
          also=("B2", "B3", "E8", "G6"), why="a part of the state is lost; by rank", formats=("megatron",)),
    Fault("x46_zero_centred", "A2", "norms are off by one, as between two ways of storing them", AFTER, zero_centred,
          also=("A3", "E12", "H1", "H2", "G6"), why="no cause says it: norms that were not loaded rightly",
          formats=("megatron",)),
    Fault("x47_squares_transposed", "E1", "q_proj and o_proj of one layer transposed, with their state", AFTER,
          drawn(transposed_squares), also=("E4", "E6", "A2"), why="another axis", formats=("megatron",)),
    Fault("x48_file_missing", "G8", "one rank's file is not there", seen("alone echo"),
          damage=lambda path, state, lab: (path / f"mp_rank_{lab.rng.randrange(2):02d}/model_optim_rng.pt").unlink(),
          also=("G4",), why="a save that was not completed", formats=("megatron",)),
    Fault("x49_head_older", "F2", "a head of its own beside the tied table: that of the save before", LOUD, older_head,
          also=("F3", "G6"), needs=with_(tied=True), why="two tables where one was", formats=("megatron",)),
    Fault("x50_balance_older", "A5", "the experts' balance is of an older save", seen("echo next"),
          lambda state, lab: replace(state, buffers=lab.run.stale.buffers), also=("G6", "E10"), needs=_expert,
          why="a buffer that was not restored", formats=("megatron",)),
    Fault("x51_layer_of_one_rank", "G6", "one rank's part of a layer is of an older save", AFTER,
          second=on_second(older_layer), formats=("megatron",)),
    Fault("x52_no_floor", "C4", "the schedule ends where it begins", AFTER,
          lambda state, lab: state.declared(min_lr=state.config.lr), also=("C2", "H1"), why="another curve",
          formats=("megatron",)),
    Fault("x53_bits_of_one_rank", "G2", "a bit of some masters of one rank is set", SOON,
          second=on_second(one_of(CUT, stuck_bit, "masters")), also=("G1", "G10", "D2"),
          why="masters that are not their weights", **TP),
    Fault("x54_file_short", "G4", "a rank's file ends early", seen("alone echo"), damage=shortened, also=("G8",),
          why="a save that was not completed", formats=("megatron",)),
]  # fmt: skip

OPENED2_ANY = [
    # the optimizer's state
    Fault("x61_betas_exchanged", "H1", "the betas in each other's place", AFTER,
          lambda state, lab: state.declared(betas=state.config.betas[::-1]), needs=with_(betas=(0.9, 0.98))),
    Fault("x62_moments_scaled", "D8", "moments hold the loss scale", AFTER,
          drawn(scaled_moments, 16.0, 128.0, 1024.0, 4096.0), also=("E12", "E13", "B10", "G3"),
          why="one factor for all first moments, its square for the second"),
    Fault("x63_variance_unscaled", "E12", "exp_avg_sq was divided by a loss scale", LOUD,
          drawn(lambda factor: mapped(lambda t: t / factor, where=("exp_avg_sq",)), 2.0**10, 2.0**16),
          also=("B6", "B11", "B4", "E13", "D8"), why="one factor; second moments too small for the first"),
    Fault("x64_momentum_of_layer", "B3", "a layer's exp_avg is zero", SOON,
          drawn(lambda n: mapped(torch.zeros_like, of_layers(n), ("exp_avg",))), also=("B1", "B6", "G5"),
          why="a part of the state is lost"),
    Fault("x65_counters_added", "B2", "the matrices' counters are twice as high", LOUD,
          steps(lambda step: 2 * step, matrices), also=("C9", "G6"), formats=FLAT, why="counters disagree"),
    Fault("x66_key_for_value", "B5", "moments of a layer's k and v exchanged", AFTER,
          drawn(lambda n: exchanged("k_proj", "v_proj", within(ends("k_proj", "v_proj"), f".layers.{n}."), MOMENTS)),
          also=("E13", "E4"), why="state of other parameters"),
    Fault("x67_rows_dealt", "E13", "moments' rows dealt to four ranks and joined rank by rank", AFTER,
          mapped(dealt_rows, CUT, MOMENTS), also=("E1", "E7", "B5"), why="rows of the state alone in another order"),
    Fault("x68_variance_even", "B11", "exp_avg_sq is one number a tensor", LOUD,
          mapped(lambda t: t.mean().expand_as(t), where=("exp_avg_sq",)), also=("B4", "B6", "E12"),
          why="another optimizer's second moment"),
    Fault("x69_momentum_behind", "G6", "exp_avg is an update behind", seen("echo next"), previous_momentum,
          also=("B6",), why="parts of two steps"),
    # masters
    Fault("x70_masters_through_tf32", "D1", "masters of ten bits", SOON, mapped(through_tf32, where=("masters",)),
          also=("D2", "D7"), needs=masters, why="masters with low bits of 0; rounded, some are another weight"),
    Fault("x71_masters_dithered", "D1", "masters made anew from bf16, low bits by chance", seen("echo next"), dithered,
          also=("D2",), needs=masters, why="masters that round to the weights, and are others"),
    Fault("x72_masters_of_norms", "D2", "masters of a layer's norms exchanged", SOON,
          drawn(lambda n: exchanged("input_layernorm", "post_attention_layernorm", within(vectors, f".layers.{n}."),
                                    ("masters",))), also=("B5", "E9"), needs=masters, why="masters of another tensor"),
    Fault("x73_weights_through_fp8", "D3", "weights went through fp8, masters are right", seen("alone echo"),
          mapped(through_fp8, matrices, ("params",)), also=("D7", "D9", "D2"), needs=masters,
          why="weights that are not their masters"),
    Fault("x74_masters_left_out", "D1", "half of the masters are not in the file", SOON, damage=masters_left_out,
          also=("A2", "D2"), needs=masters, formats=("torch_masters",), why="tensors that are missing"),
    Fault("x75_masters_of_layers", "D2", "a file's own masters are the next layer's", LOUD,
          moved(layered(turned), where=("masters",)), also=("E9", "B5"), needs=masters, formats=("torch_masters",),
          why="masters of another tensor"),
    # layouts
    Fault("x76_heads_of_output", "E6", "columns of o_proj by head in another order", AFTER, heads_of_output,
          also=("E1", "E4"), needs=_grouped, why="heads in another order"),
    Fault("x77_pairs_of_queries", "E5", "rows of q permuted to halves once more", AFTER, to_halves, also=("E6",),
          why="rows moved within heads"),
    Fault("x78_four_ranks_gated", "E2", "[gate; up] of four ranks put together naively, in one layer", AFTER,
          drawn(four_naive), also=("E3", "E1"), why="rows of both in another order"),
    Fault("x79_one_gate", "E3", "gate and up of one layer exchanged", AFTER,
          drawn(lambda n: exchanged("gate_proj", "up_proj", within(ends("gate_proj", "up_proj"), f".layers.{n}.")))),
    Fault("x80_columns_reversed", "E1", "four shards of down_proj's columns in reverse order", AFTER,
          mapped(lambda t: torch.cat(t.chunk(4, 1)[::-1], 1), ends("down_proj")), also=("E7", "E8"),
          why="shards in another order"),
    Fault("x81_flat_layer", "E7", "a layer's flat parameter read some elements too early", AFTER, shifted_layer,
          also=("E13", "E8", "A2", "B5"), formats=FLAT, why="an offset within a flat line"),
    Fault("x82_rows_of_nobody", "E8", "rows beyond an even share are zero", LOUD, rest_rows_zero, also=("G5", "A2"),
          why="rows that no rank wrote"),
    Fault("x83_half_experts", "E10", "down_proj of a layer's experts turned, their gate and up right", AFTER,
          drawn(crossed_experts), also=("E9",), needs=_expert, why="parts of experts elsewhere"),
    Fault("x84_padding_first", "E11", "the vocabulary's padding stands first", LOUD, padding_first, also=("F7", "E1"),
          needs=_spare, why="rows of the vocabulary moved, trained ones among the padding"),
    Fault("x85_factor", "E12", "weights of one kind times a number of ranks", AFTER,
          drawn(lambda how: mapped(lambda t: t.float() * how[1], ends(how[0]), WEIGHTS),
                ("o_proj", 2.0), ("v_proj", 4.0), ("up_proj", 0.5), ("down_proj", 0.25))),
    # vocabulary, averages, adapters
    Fault("x86_rows_zero", "F7", "the last rows of the vocabulary are zero", LOUD, rows_zero,
          also=("A2", "G5", "E8", "G4"), why="rows that were not loaded"),
    Fault("x87_specials_first", "F7", "special tokens moved from the end to the begin", AFTER, specials_first,
          also=("E11", "E1"), why="rows of the vocabulary in another order"),
    Fault("x88_rows_of_unknown", "F7", "eight tokens have the row of a ninth", LOUD, rows_of_unknown,
          also=("A2", "E8"), why="rows of other tokens"),
    Fault("x89_padding_reborn", "A2", "the vocabulary's padding is random again", AFTER, padding_reborn,
          also=("E11", "F7", "E8"), needs=_spare, why="rows that were not loaded"),
    Fault("x90_head_without_state", "F2", "a copy of the tied table becomes a head without state", LOUD,
          head_without_state, also=("B1", "F3"), needs=with_(tied=True), why="two tables where one was"),
    Fault("x91_partly_averaged", "F4", "half of the weights are the average's", SOON, partly_averaged, also=("G6",),
          why="parts of two sets of weights", **WITH_EMA),
    Fault("x92_average_too_quick", "F4", "the average forgets within a few updates", LATER,
          told(lambda s: {"silent": (("ema", 0.5),)}), also=("H1",), why="another decay of the average", **WITH_EMA),
    Fault("x93_average_older", "G6", "the average is of an older save", seen("echo next"), older_average, also=("F4",),
          why="the average is not of this save", **WITH_EMA),
    Fault("x94_adapter_of_layer", "F5", "one layer's adapters are as initialised", LOUD,
          drawn(lambda n: mapped(torch.zeros_like, within(ends("lora_B"), f".layers.{n}."), WEIGHTS)),
          also=("A2", "G5"), why="tensors that were not loaded", **WITH_LORA),
    Fault("x95_unmerged", "F5", "adapters subtracted from a base that did not hold them", AFTER, unmerged,
          also=("F6", "A2"), why="frozen weights that changed", **WITH_LORA),
    Fault("x96_lower_rank", "F5", "adapters cut to half of their rank", LOUD, lower_rank, also=("A2", "G5", "E8"),
          why="a part of the adapters is zero", **WITH_LORA),
    # values
    Fault("x97_sign", "G2", "the sign of one bf16 weight is the other", seen("alone echo"),
          one_of(CUT, sign_of_one, "params"), also=("G1", "D3"), needs=masters, why="a weight that is not its master"),
    Fault("x98_stuck_bit", "G2", "a bit of every 64th element of a matrix is set", SOON,
          one_of(CUT, stuck_bit, "updated"), also=("G1", "G10", "D2"), blind=_without_copies,
          why="elements that differ by a bit"),
    Fault("x99_torn_page", "G6", "4 KiB of a second moment are of the save before", SOON, damage=torn_page,
          also=("G10", "G5", "G2", "G1", "B6", "G3"), needs=with_(precision="fp32"),
          formats=("torch_save", "lightning"), why="bytes of two saves; checksums of the file do not fit"),
    Fault("x100_infinite_variance", "G3", "one second moment is infinite", LOUD,
          one_of(CUT, infinite, "exp_avg_sq"), also=("G1", "G9"), why="a number that is none"),
    Fault("x101_matrix_zero", "A2", "one matrix is zero", LOUD, in_weights(CUT, lambda t, lab: torch.zeros_like(t)),
          also=("G5", "G10"), why="a tensor that was not filled"),
    Fault("x102_never_filled", "G1", "one matrix is memory as it was found", LOUD, in_weights(CUT, never_filled),
          also=("A2", "G6", "G10", "G9"), why="a tensor that was not filled"),
    Fault("x103_momentum_through_fp8", "D4", "exp_avg went through fp8", SOON,
          mapped(lambda t: t.to(torch.float8_e5m2).float(), where=("exp_avg",)), also=("B6", "B3"),
          needs=with_(precision="fp32"), formats=FLAT, why="rounding, by which small first moments vanish"),
    # the trainer
    Fault("x104_step_zero", "C9", "the trainer counts from 0 again", LOUD, told(lambda s: {"step": 0}),
          also=("B2", "G6"), formats=(*FLAT, "deepspeed"), why="counters disagree"),
    Fault("x105_data_again", "C6", "the data of the last twenty updates comes again", LOUD,
          told(lambda s: {"data_index": s.trainer.data_index - 20, "loader": s.trainer.loader - 20}),
          also=("C7", "C9", "G6"), formats=ARGUED, why="a position behind the step's"),
    Fault("x106_data_again_untold", "C6", "the data of the last twenty updates comes again, and no file holds it",
          AFTER, told(lambda s: {"data_index": s.trainer.data_index - 20}), visible=False,
          formats=("folder", "lightning", "accelerate")),
    Fault("x107_schedule_stands", "B8", "nobody steps the schedule after the resume", LATER,
          told(lambda s: {"silent": (("schedule", 0),)}), also=("C1", "C2", "C3", "C9", "H1"),
          why="the schedule stays behind the step"),
    Fault("x108_decay_tenfold", "H1", "ten times the weight decay", AFTER,
          lambda state, lab: state.declared(weight_decay=10 * state.config.weight_decay), also=("B7", "C5"),
          why="the groups tell the new value"),
    Fault("x109_vectors_at_begin", "B8", "the vectors' group has the lr of the first update", LOUD,
          told(lambda s: {"vector_lr": s.config.lr / s.config.warmup}), also=("C1", "C2"), formats=FLAT,
          why="a group beyond the schedule"),
    Fault("x110_warm_up_longer", "C4", "a longer warm-up, from a default", AFTER,
          lambda state, lab: state.declared(warmup=state.config.resume + 80, total=state.config.total + 200),
          also=("C1", "C2", "H1"), formats=(*ARGUED, "megatron"), why="another curve, by an argument"),
    Fault("x116_lr_a_quarter_more", "H1", "updates at 1.25 times the lr that the files say", seen("next"),
          told(lambda s: {"silent": (("lr", 1.25),)}), also=("C2", "B8", "C1"), why="the lr in use is another one"),
    Fault("x117_older_save", "G7", "another, much older save was loaded, and is right in itself", AFTER,
          lambda state, lab: lab.run.stale, also=("G8", "G6", "C9", "C6"),
          why="all counters are those of an older step"),
    # the saver
    Fault("x111_saver_without_optimizer", "B1", "saves after the resume hold no state of the optimizer", LATER, same,
          saver=without_optimizer, formats=FLAT),
    Fault("x112_saver_one_moment", "B6", "saves after the resume hold exp_avg under both names", LATER, same,
          saver=one_moment_twice, also=("B4", "B5", "B11", "G3"), why="negative second moments", formats=FLAT),
    Fault("x113_saver_fp16", "D7", "saves after the resume went through fp16", LATER, same, saver=through_fp16,
          also=("D1",), needs=with_(precision="fp32"), formats=FLAT, why="weights are their own masters"),
    Fault("x114_saver_average", "F4", "saves after the resume hold the average as the weights", LATER, same,
          saver=average_for_weights, needs=with_(ema=True, precision="fp32"), formats=EXTRA),
    Fault("x115_saver_step", "C9", "saves after the resume name a later step", LATER, same, saver=step_read_late,
          also=("G6", "B2"), why="counters disagree"),
]  # fmt: skip


# ---- healthy ---------------------------------------------------------------------------------------------------------


def well(id: str, text: str, needs: dict[str, Any] | Callable[[Config], Config], **more: Any) -> Fault:
    """A resume that changes nothing, in a run like that."""
    needed = needs if callable(needs) else with_(**needs)
    return Fault(id, "healthy", text, frozenset(), same, needs=needed, kind="healthy", **more)


def meant(id: str, text: str, true: tuple[str, ...], restore: Restore, **more: Any) -> Fault:
    """A change on purpose; ``true`` are causes that may be named, as a warning at most."""
    return Fault(id, "healthy", text, frozenset(), restore, kind="deliberate", also=true, **more)


def longer_rope(state: State, lab: Lab) -> State:
    return state.declared(rope_theta=4 * state.config.rope_theta)


OPENED2_WELL = [
    well("k01_floor", "resumed after the schedule's end", lambda c: c.but(total=c.resume - 10)),
    well("k02_no_first_moment", "beta1 of 0", {"betas": (0.0, 0.95)}),
    well("k03_slow_betas", "betas of 0.98 and 0.9999", {"betas": (0.98, 0.9999)}),
    well("k04_equal_betas", "both betas 0.95", {"betas": (0.95, 0.95)}),
    well("k05_no_decay", "no weight decay", {"weight_decay": 0.0}),
    well("k06_much_decay", "a weight decay of 1", {"weight_decay": 1.0}),
    well("k07_large_eps", "an eps above the second moments' roots", {"eps": 1e-2}),
    well("k08_tiny_lr", "bf16 weights that stand still while their masters move",
         {"lr": 2e-6, "min_lr": 1e-6, "precision": "mixed"}, formats=("megatron", "deepspeed", "dcp", "torch_save"),
         also=("D6",)),
    well("k09_tight_clip", "clipped to a thousandth", {"clip": 1e-3}),
    well("k10_adam_masters", "Adam with decay in the gradient, masters", {"optimizer": "adam", "precision": "mixed"},
         formats=("megatron", "deepspeed", "torch_masters")),
    well("k11_other_mesh", "experts, going on in another layout", {"experts": 4, "tied": False}, elsewhere=True,
         formats=("deepspeed", "megatron", "dcp_sharded")),
    well("k12_other_mesh_in_parts", "another layout, and the batch in eight parts", {"batch": 8}, elsewhere=True,
         micro=8),
    well("k13_average_and_scale", "an average, a loss scale", {"ema": True, "scaler": True}, formats=EXTRA),
    well("k14_adapters_in_bf16", "adapters with masters", {"lora": 2, "precision": "mixed"},
         formats=("torch_save", "dcp")),
    well("k15_full_vocabulary", "no padding", lambda c: c.but(padded=112, vocab=112)),
    well("k16_much_padding", "more padding than tokens", lambda c: c.but(padded=256)),
    well("k17_many_layers", "twelve small layers", lambda c: c.but(
        layers=12, heads=2, groups=2, hidden=16, ffn=64, batch=2, experts=0, resume=min(c.resume, 60))),
    well("k18_fp8", "fp8 with histories", {"fp8": True}, formats=("torch_save", "dcp", "lightning")),
    well("k19_nothing_told", "no schedule, no arguments, no random states are stored",
         {"unstored": ("scheduler", "args", "rng_state", "config")}, formats=("torch_save", "dcp", "torch_masters")),
    meant("o01_base_of_rope", "a longer context: another base of the rotary embedding", ("H1", "H2"), longer_rope,
          formats=("torch_save", "dcp", "folder", "deepspeed")),
    meant("o02_cooldown", "the operator begins the cool-down now", ("H1", "C4", "C2"),
          lambda state, lab: state.declared(total=state.config.resume + 40, min_lr=0.0),
          formats=(*ARGUED, "megatron")),
    meant("o03_no_clip", "the operator does not clip any more", ("H1",),
          lambda state, lab: state.declared(clip=0.0), needs=with_(clip=1.0), formats=("megatron", "deepspeed")),
]  # fmt: skip

OPENED2_FAULTS = [*OPENED2_ZERO, *OPENED2_TP, *OPENED2_ANY, *OPENED2_WELL]
