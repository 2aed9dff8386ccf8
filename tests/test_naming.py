"""Names: what a key means, where the whole set decides, and that a number is never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.names.optimizer import join_param_groups
from workbench.names.roles import resolve


def meaning(*keys: str, paths: dict[str, tuple[Any, ...]] | None = None) -> dict[str, tuple[str | None, str]]:
    fqns, roles = resolve(keys, {"paths": paths} if paths else None)
    return dict(zip(keys, zip(fqns, roles, strict=True), strict=True))


@pytest.mark.parametrize(
    ("key", "fqn", "role"),
    [
        ("fc.weight", "fc.weight", "param"),
        ("_orig_mod.fc.weight", "fc.weight", "param"),
        ("layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.fc.weight", "layers.0.fc.weight", "param"),
        ("optim.state.fc.weight.exp_avg", "fc.weight", "exp_avg"),
        ("optimizer.state.fc.weight.exp_avg_sq", "fc.weight", "exp_avg_sq"),
        ("optimizer.state._orig_mod.fc.weight.step", "fc.weight", "step"),
        ("optim.state.fc.weight.momentum_buffer", "fc.weight", "momentum"),
        ("optim.state.fc.weight.max_exp_avg_sq", "fc.weight", "max_exp_avg_sq"),
        ("optim.state.fc.weight.square_avg", "fc.weight", "square_avg"),
        ("optim.state.fc.weight.master_param", "fc.weight", "master"),
        ("app.optim.state.fc.weight.exp_avg", "fc.weight", "exp_avg"),
        ("state.fc.weight.exp_avg", "fc.weight", "exp_avg"),
        ("optimizer.state.0.exp_avg", None, "exp_avg"),
        ("optimizer_states.0.state.12.exp_avg_sq", None, "exp_avg_sq"),
        ("state.3.step", None, "step"),
        ("optim.param_groups.0.lr", None, "other"),
        ("base_model.model.model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.weight", "lora_A"),
        ("base_model.model.q_proj.lora_B.default.weight", "q_proj.weight", "lora_B"),
        ("base_model.model.embed.lora_embedding_A", "embed.weight", "lora_A"),
        ("base_model.model.q_proj.lora_magnitude_vector", "q_proj.weight", "lora_magnitude_vector"),
        ("base_model.model.lm_head.modules_to_save.weight", "lm_head.weight", "param"),
        ("base_model.model.q_proj.base_layer.weight", "q_proj.weight", "param"),
        ("layers.0.mlp.up.weight_scale_inv", "layers.0.mlp.up.weight", "scale"),
        ("layers.0.mlp.up.weight_scale", "layers.0.mlp.up.weight", "scale"),
        ("layers.0.mlp.up.input_scale", "layers.0.mlp.up.weight", "scale"),
        ("layers.0.mlp.up.weight_global_scale", "layers.0.mlp.up.weight", "scale"),
        ("layers.0.mlp.up.qweight", "layers.0.mlp.up.weight", "param"),
        ("layers.0.mlp.up.scales", "layers.0.mlp.up.weight", "scale"),
        ("layers.0.mlp.up.qzeros", "layers.0.mlp.up.weight", "zero_point"),
        ("layers.0.mlp.experts.down_proj_blocks", "layers.0.mlp.experts.down_proj", "param"),
        ("layers.0.mlp.experts.down_proj_scales", "layers.0.mlp.experts.down_proj", "scale"),
        ("up.weight.absmax", "up.weight", "scale"),
        ("up.weight.quant_state.bitsandbytes__nf4", "up.weight", "scale"),
        ("attn.core._extra_state", "attn.core._extra_state", "other"),
        ("bn.running_mean", "bn.running_mean", "buffer"),
        ("bn.num_batches_tracked", "bn.num_batches_tracked", "buffer"),
        ("rotary.inv_freq", "rotary.inv_freq", "buffer"),
        ("embeddings.position_ids", "embeddings.position_ids", "buffer"),
        ("rng_state", None, "other"),
        (".absmax", "", "scale"),
        ("rng.rank0", None, "other"),
        ("cuda_rng_state.1", None, "other"),
        ("train_state.losses", None, "other"),
        ("ema.fc.weight", "fc.weight", "ema"),
        ("ema_model.module.fc.weight", "module.fc.weight", "ema"),
        ("logit_scale", "logit_scale", "param"),
        ("learnt_scaler.weight", "learnt_scaler.weight", "param"),
        ("string_rngs.weight", "string_rngs.weight", "param"),
        ("opt_head.weight", "opt_head.weight", "param"),
        ("options.weight", "options.weight", "param"),
        ("optimus.weight", "optimus.weight", "param"),
        ("optim.fc.weight.exp_avg", "fc.weight", "exp_avg"),
        ("optimizer.loss_scale", None, "other"),
    ],
)
def test_a_name_by_itself(key: str, fqn: str | None, role: str) -> None:
    if key.startswith("ema_model"):
        fqn = "fc.weight"  # `module.` is a wrapper when every key of the container has it
    assert meaning(key)[key] == (fqn, role)


def test_get_state_dict_of_a_hugging_face_model_keeps_the_models_own_prefix() -> None:
    found = meaning(
        "model.model.embed_tokens.weight",
        "model.lm_head.weight",
        "optim.state.model.embed_tokens.weight.exp_avg",
        "optim.state.lm_head.weight.exp_avg",
        "rng_shared_key",
        "train_state.tokens",
    )
    assert found["model.model.embed_tokens.weight"] == ("model.embed_tokens.weight", "param")
    assert found["model.lm_head.weight"] == ("lm_head.weight", "param")
    assert found["optim.state.model.embed_tokens.weight.exp_avg"] == ("model.embed_tokens.weight", "exp_avg")
    assert found["rng_shared_key"] == found["train_state.tokens"] == (None, "other")


def test_without_an_optimizer_a_second_model_tells_the_container() -> None:
    found = meaning("model.model.norm.weight", "model.lm_head.weight")
    assert found["model.lm_head.weight"] == ("lm_head.weight", "param")


def test_a_flat_hugging_face_state_dict_is_left_alone() -> None:
    keys = ("model.embed_tokens.weight", "model.norm.weight")  # tied: every key begins with `model.`
    assert meaning(*keys) == {key: (key, "param") for key in keys}
    flat = meaning("model.norm.weight", "optimizer.state.model.norm.weight.exp_avg")  # torchtitan's layout of it
    assert flat["model.norm.weight"] == ("model.norm.weight", "param")


def test_plain_models_and_torchtitan() -> None:
    found = meaning("model.layers.0.w", "optim.state.layers.0.w.exp_avg")
    assert found["model.layers.0.w"] == ("layers.0.w", "param")
    found = meaning(
        "layers.0.w",
        "optimizer.state.layers.0.w.exp_avg",
        "optimizer.param_groups.layers.0.w.lr",
        "train_state.step",
        "lr_scheduler.last_epoch",
        "dataloader.dp_rank_0",
    )
    assert found["layers.0.w"] == ("layers.0.w", "param")
    assert [role for _, role in found.values()].count("other") == 4
    assert found["optimizer.param_groups.layers.0.w.lr"] == (None, "other")


def test_paths_are_certain_where_names_are_not() -> None:
    wrapped = {"model.norm.weight": ("model", "norm.weight"), "step": ("step",)}
    assert meaning(*wrapped, paths=wrapped)["model.norm.weight"] == ("norm.weight", "param")
    assert meaning(*wrapped, paths=wrapped)["step"] == (None, "other")
    flat: dict[str, tuple[Any, ...]] = {"model.model.w": ("model.model.w",), "model.lm_head.w": ("model.lm_head.w",)}
    assert meaning(*flat, paths=flat)["model.model.w"] == ("model.model.w", "param")
    odd = {"optim.state.a.b.c.exp_avg": ("optim", "state", "a.b", "c", "exp_avg")}
    assert meaning(*odd, paths=odd)["optim.state.a.b.c.exp_avg"] == ("a.b", "exp_avg")
    lightning = {"state_dict.model.model.w": ("state_dict", "model.model.w")}
    assert meaning(*lightning, paths=lightning)["state_dict.model.model.w"] == ("model.model.w", "param")


def test_module_is_a_wrapper_only_where_every_key_has_it() -> None:
    assert meaning("module.fc.weight", "module.fc.bias")["module.fc.bias"] == ("fc.bias", "param")
    assert meaning("module.module.fc.weight")["module.module.fc.weight"] == ("fc.weight", "param")
    assert meaning("module.fc.weight", "head.weight")["module.fc.weight"] == ("module.fc.weight", "param")
    found = meaning("model.module.fc.weight", "optim.state.fc.weight.exp_avg", "rng_state")
    assert found["model.module.fc.weight"][1] == "param"


def test_a_compiled_model_keeps_names_that_are_a_trainers_elsewhere() -> None:
    names = meaning("_orig_mod.step.head.weight", "_orig_mod.module.fc.weight")
    assert [fqn for fqn, _ in names.values()] == ["step.head.weight", "module.fc.weight"]


def test_ema_names_the_parameter_that_it_averages() -> None:
    found = meaning("model.model.w", "model.lm_head.w", "ema.model.w", "ema.lm_head.w")
    assert found["ema.model.w"] == ("model.w", "ema") and found["ema.lm_head.w"] == ("lm_head.w", "ema")


def test_nested_optimizer_state_belongs_to_the_longest_known_parameter() -> None:
    found = meaning("fc.weight", "optim.state.fc.weight.0.inv_factor_matrices.1", "optim.state.x.0.y.1")
    assert found["optim.state.fc.weight.0.inv_factor_matrices.1"] == ("fc.weight", "other")
    assert found["optim.state.x.0.y.1"] == (None, "other")


def test_torchs_own_get_state_dict_is_understood() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.state_dict import get_state_dict

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.up = torch.nn.Linear(4, 3)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()
            self.lm_head = torch.nn.Linear(3, 2)

    model = Outer()
    optimizer = torch.optim.AdamW(model.parameters())
    model.lm_head(model.model.up(model.model.norm(torch.randn(5, 4)))).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    flat, paths = flatten_state_dict({"model": weights, "optim": moments})
    keys = [key for key, value in flat.items() if torch.is_tensor(value)]
    params = dict(model.named_parameters())
    for hints in (None, {"paths": paths}):
        fqns, roles = resolve(keys, hints)
        found = set(zip(fqns, roles, strict=True))
        wanted = {(name, role) for name in params for role in ("param", "exp_avg", "exp_avg_sq", "step")}
        wanted |= {(f"model.norm.{name}", "buffer") for name in ("running_mean", "running_var", "num_batches_tracked")}
        assert found == wanted


def test_vectors_of_a_spectral_norm_are_buffers_and_a_weight_norm_has_none() -> None:
    inner = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 4))
    model = torch.nn.ModuleDict({"a": inner, "b": torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))})
    _, roles = resolve(list(model.state_dict()))
    trained = dict(model.named_parameters())
    assert roles == ["param" if name in trained else "buffer" for name in model.state_dict()]


def test_a_hundred_thousand_names() -> None:
    keys = []
    for i in range(25_000):
        name = f"layers.{i // 9}.mlp.experts.{i}.weight"
        keys += [f"model.{name}", *(f"optim.state.{name}.{state}" for state in ("exp_avg", "exp_avg_sq", "step"))]
    fqns, roles = resolve(keys)
    assert fqns[0] == fqns[1] == "layers.0.mlp.experts.0.weight" and roles[:2] == ["param", "exp_avg"]


# ---- integer ids ---------------------------------------------------------------------------------------------

SHAPES = {"emb": (10, 4), "q": (4, 4), "o": (4, 4), "norm.weight": (4,), "head": (10, 4)}
NAMES = list(SHAPES)


def ids(*groups: list[int]) -> list[dict[str, Any]]:
    return [{"lr": 0.1, "params": group} for group in groups]


def test_names_in_the_groups_are_certain() -> None:
    named = [{"params": [0, 2], "param_names": ["a", "c"]}, {"params": [1], "param_names": ["b"]}]
    assert join_param_groups(named, {}, [], {}, ordered=False) == {0: "a", 2: "c", 1: "b"}


def test_names_in_the_groups_as_torch_writes_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(list(model.named_parameters())[::-1], lr=0.1)
    joined = join_param_groups(optimizer.state_dict()["param_groups"], {}, [], {}, ordered=False)
    assert joined == {0: "1.bias", 1: "1.weight", 2: "0.bias", 3: "0.weight"}


def test_ordered_names_of_one_group_are_joined_when_every_shape_agrees() -> None:
    shapes = {i: SHAPES[name] for i, name in enumerate(NAMES)}
    assert join_param_groups(ids([0, 1, 2, 3, 4]), shapes, NAMES, SHAPES, ordered=True) == dict(enumerate(NAMES))
    wrong = shapes | {1: (10, 4), 0: (4, 4)}  # the same shapes in another order: only what is alone is certain
    assert join_param_groups(ids([0, 1, 2, 3, 4]), wrong, NAMES, SHAPES, ordered=True) == {3: "norm.weight"}


def test_trainers_two_groups_are_joined_by_its_own_rule() -> None:
    shapes = {0: (10, 4), 1: (4, 4), 2: (4, 4), 3: (10, 4), 4: (4,)}
    joined = join_param_groups(ids([0, 1, 2, 3], [4]), shapes, NAMES, SHAPES, ordered=True)
    assert joined == {0: "emb", 1: "q", 2: "o", 3: "head", 4: "norm.weight"}


def test_of_a_frozen_model_the_adapters_are_joined() -> None:
    shapes = {"q.weight": (4, 4), "q.lora_A.weight": (2, 4), "q.lora_B.weight": (4, 2), "norm.weight": (4,)}
    adapters, base = {0: (2, 4), 1: (4, 2)}, {0: (4, 4), 1: (4,)}
    joined = join_param_groups(ids([0, 1]), adapters, list(shapes), shapes, ordered=True)
    assert joined == {0: "q.lora_A.weight", 1: "q.lora_B.weight"}
    del shapes["q.lora_B.weight"]  # then the base may be what is trained
    assert join_param_groups(ids([0, 1]), base, list(shapes), shapes, ordered=True) == {0: "q.weight", 1: "norm.weight"}


def test_masks_and_counts_of_a_model_have_no_number(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[0].register_buffer("mask", torch.ones(3, 4, dtype=torch.bool))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    states = {t.key: t.fqn for t in wb.open(tmp_path / "a.pt").values() if t.role == "exp_avg"}
    assert list(states.values()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_unordered_names_give_only_shapes_that_nobody_shares() -> None:
    shapes = {i: SHAPES[name] for i, name in enumerate(NAMES)}
    assert join_param_groups(ids([0, 1, 2, 3, 4]), shapes, sorted(NAMES), SHAPES, ordered=False) == {3: "norm.weight"}


@pytest.mark.parametrize(
    ("groups", "shapes", "names"),
    [
        (ids([0, 1]), {0: (4, 4), 1: (4, 4)}, ["q", "o"]),  # all alike: an order would prove nothing
        (ids([0, 1, 2]), {0: (4, 4), 1: (4, 4), 2: (4,)}, ["q", "o"]),  # another number of parameters
        (ids([0, 0]), {0: (4, 4)}, ["q", "o"]),  # the same id twice
        ([{"params": ["q", "o"]}], {}, ["q", "o"]),  # names already
        (ids([0, 1]), {0: (4, 4), 1: (5,)}, ["q", "norm.weight"]),  # a shape that no parameter has
        ([], {}, []),
        ([{"params": [0, 1], "param_names": ["a", "a"]}], {}, []),
    ],
)
def test_what_is_not_certain_is_not_joined(groups: Any, shapes: Any, names: list[str]) -> None:
    assert join_param_groups(groups, shapes, names, SHAPES, ordered=True) is None
