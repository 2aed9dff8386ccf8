"""Corruption: flipped bits, zeroed pages, ranks that wrote different things.

A bit flips in memory, before the save: checksums that the format writes are then those of the flipped bit, so that only
values or older hashes can tell. A page is zeroed in the file, after the save: checksums no longer fit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.model import is_norm
from tests.lab.state import Named, State

__all__ = ["CORRUPTIONS", "flip", "zero_pages"]

PAGE = 4096


def flip(tensor: torch.Tensor, index: int, bit: int) -> torch.Tensor:
    """A copy with one bit of one element flipped; bits count from the sign down, negative ones from the last up."""
    width = 8 * tensor.element_size()
    changed = tensor.clone()
    place = width - 1 - bit if bit >= 0 else -1 - bit
    mask = 1 << place
    view = changed.view({16: torch.int16, 32: torch.int32}[width]).view(-1)
    view[index] ^= mask - (1 << width) if place == width - 1 else mask
    return changed


def zero_pages(root: Path, tensor: torch.Tensor, pages: int) -> slice:
    """Zero up to so many whole 4 KiB pages of a file that hold nothing but this tensor; returns its bytes in them.

    The place is found by the bytes themselves, whatever the layout; rows may be in one file or shared among several.
    A layout that does not align its payloads has half elements at the pages' ends.
    """
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
        content = file.read_bytes() if file.is_file() else b""
        for at in range(0, len(data) - 64, max(64, len(data) // 64 // 4 * 4)):
            found = content.find(data[at : at + 64])
            if found < 0:
                continue
            length = _common(content, found, data, at)
            first = -(-found // PAGE) * PAGE
            count = min(pages, (found + length - first) // PAGE)
            if count > 0:
                with open(file, "r+b") as stream:
                    stream.seek(first)
                    stream.write(bytes(count * PAGE))
                return slice(at + first - found, at + first - found + count * PAGE)
    raise ValueError(f"no page of a file holds only a tensor of {len(data)} bytes; take a larger model")


def _common(content: bytes, found: int, data: bytes, at: int) -> int:
    """Length of the run from there on in which both agree."""
    limit = min(len(content) - found, len(data) - at)
    low, high = 64, limit
    while low < high:
        middle = (low + high + 1) // 2
        if content[found : found + middle] == data[at : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---- bits ----------------------------------------------------------------------------------------------------------


def _pick(tensors: Named, lab: Lab, zero_bit: int | None = None) -> tuple[str, int]:
    """A matrix of a layer and an element of it that is not 0, with that bit clear if one is asked for."""
    name = lab.rng.choice([name for name in tensors if ".layers." in name and not is_norm(name)])
    flat = tensors[name].reshape(-1)
    for index in lab.rng.sample(range(len(flat)), len(flat)):
        value = flat[index : index + 1]
        clear = zero_bit is None or bool(flip(value, 0, zero_bit).abs() > value.abs())
        if bool(value != 0) and clear:
            return name, index
    raise ValueError(f"every element of {name!r} is 0 or has that bit set")


def _flip_weight(state: State, lab: Lab, bit: int) -> State:
    name, index = _pick(state.updated, lab)
    state.updated[name] = flip(state.updated[name], index, bit)
    return state


def top_exponent(state: State, lab: Lab) -> State:
    return _flip_weight(state, lab, 1)


def low_exponent(state: State, lab: Lab) -> State:
    return _flip_weight(state, lab, 6)


def mantissa(state: State, lab: Lab) -> State:
    return _flip_weight(state, lab, -4)


def half_weight(state: State, lab: Lab) -> State:
    name, index = _pick(state.params, lab)
    state.params[name] = flip(state.params[name], index, 1)
    return state


def variance_sign(state: State, lab: Lab) -> State:
    name, index = _pick(state.exp_avg_sq, lab)
    state.exp_avg_sq[name] = flip(state.exp_avg_sq[name], index, 0)
    return state


def variance_up(state: State, lab: Lab) -> State:
    name, index = _pick(state.exp_avg_sq, lab, zero_bit=4)
    state.exp_avg_sq[name] = flip(state.exp_avg_sq[name], index, 4)
    return state


def not_a_number(state: State, lab: Lab) -> State:
    name, index = _pick(state.exp_avg, lab)
    state.exp_avg[name].view(-1)[index] = math.nan
    return state


def mixed_steps(state: State, lab: Lab) -> State:
    """Two parameters of the later half, so that ZeRO's second rank holds them."""
    names = [name for name in state.step if not is_norm(name)]
    for name in lab.rng.sample(names[len(names) * 3 // 4 :], 2):
        state.step[name] = float(lab.run.config.stale)
    return state


# ---- ranks ---------------------------------------------------------------------------------------------------------


def stale_rank(state: State, lab: Lab) -> State:
    return replace(lab.run.stale, trainer=state.trainer)


def stale_rank_weights(state: State, lab: Lab) -> State:
    return replace(state, params=lab.run.recent.params)


def drifted_norm(state: State, lab: Lab) -> State:
    name = lab.rng.choice([name for name in state.params if is_norm(name)])
    return replace(state, masters={**state.masters, name: state.masters[name] * 1.001})


# ---- pages ---------------------------------------------------------------------------------------------------------


def _large(tensors: Named, lab: Lab) -> str:
    """One of the largest matrices that ranks share by rows: a whole page of some file is its own."""
    return lab.rng.choice([name for name in tensors if name.endswith(("gate_proj.weight", "up_proj.weight"))])


def _zeroed(path: Path, tensors: Named, lab: Lab, pages: int) -> None:
    name = _large(tensors, lab)
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1).view(torch.uint8)[zero_pages(path, tensors[name], pages)] = 0


def page_of_master(path: Path, state: State, lab: Lab) -> State:
    _zeroed(path, state.updated, lab, 1)
    return state


def page_of_variance(path: Path, state: State, lab: Lab) -> State:
    _zeroed(path, state.exp_avg_sq, lab, 1)
    return state


def hole_in_weights(path: Path, state: State, lab: Lab) -> State:
    _zeroed(path, state.params, lab, 4)
    return state


CORRUPTIONS = [
    Fault("c01_bitflip_exp_master", "G1", "top exponent bit of one fp32 master flipped",
          seen("alone echo next early late manifest"), top_exponent),
    Fault("c02_bitflip_low_exp_master", "G2", "a low exponent bit of one fp32 master flipped (x16 or /16)",
          seen("alone echo next early manifest"), low_exponent,
          blind=lambda config, format: config.precision != "mixed"),
    Fault("c03_bitflip_w16", "G1", "top exponent bit of one bf16 weight flipped, masters fine",
          seen("alone echo manifest"), half_weight, also=("D3",), needs=masters,
          why="a weight that is not its master"),
    Fault("c04_bitflip_mantissa", "G2", "a low mantissa bit of one fp32 master flipped",
          seen("echo manifest"), mantissa),
    Fault("c05_bitflip_v_sign", "G3", "sign bit of one exp_avg_sq flipped",
          seen("alone echo next early late manifest"), variance_sign),
    Fault("c06_bitflip_v_exp", "G3", "an exponent bit of one exp_avg_sq flipped (x 65536)",
          seen("echo manifest"), variance_up),
    Fault("c07_stale_shard", "G6", "rank 1 wrote an older step",
          seen("alone echo next early manifest"), second=stale_rank,
          blind=lambda config, format: format not in ("megatron", "deepspeed")),
    Fault("c08_stale_shard_w16", "G6", "rank 1's weights alone are of the checkpoint before",
          seen("alone echo manifest"), second=stale_rank_weights, also=("D3",), needs=masters, weights=True,
          why="weights that are not their masters"),
    Fault("c09_zero_page_master", "G5", "one 4 KiB page zeroed in a master",
          seen("alone echo next early manifest"), damage=page_of_master),
    Fault("c10_zero_page_v", "G5", "one 4 KiB page zeroed in an exp_avg_sq",
          seen("alone echo next early manifest"), damage=page_of_variance),
    Fault("c11_zero_tail_w16", "G5", "up to 16 KiB of pages zeroed in the bf16 weights",
          seen("alone echo manifest"), damage=hole_in_weights, needs=masters),
    Fault("c12_replica_norm", "F1", "rank 1's copy of a norm's master is 1.001 times rank 0's",
          seen("alone manifest"), second=drifted_norm, needs=masters, formats=("megatron",)),
    Fault("c13_nan_m", "G1", "one NaN in exp_avg", seen("alone echo next early late manifest"), not_a_number,
          also=("G9",),
          why="a computation may have made it"),
    Fault("c14_step_mixed", "G6", "the steps of two parameters are older",
          seen("alone echo next early late manifest"), mixed_steps, also=("B2", "C9"),
          why="counters that disagree"),
]  # fmt: skip
