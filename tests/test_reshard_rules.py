"""Placement rules against what transformers' own plans and Megatron's own cuts say."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tests import megatron_files as megatron
from tests.resharding import assembled
from workbench import open as open_checkpoint
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import by_name
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Flat, Only, PartedShard, Replicate, Shard, StridedShard
from workbench.core.place import Place
from workbench.errors import UsageError
from workbench.export.sharding.kinds import kind_of
from workbench.export.sharding.rules import PlacementRule, Rules
from workbench.export.sharding.target import Target
from workbench.names.frameworks import Geometry, geometry


def placed(tmp_path, shapes, mesh, rules=None, facts=None, roles=None):
    """Layouts by key of a catalog of these shapes, and the notes."""
    builder = CatalogBuilder("test", Place(tmp_path))
    for key, shape in shapes.items():
        builder.tensor(key, by_name("float32"), shape)
    catalog = builder.build()
    fqns = [key.partition("@")[0] for key in shapes]
    roles = [key.partition("@")[2] or "param" for key in shapes]
    layouts, notes = (rules or Rules()).place(catalog, fqns, roles, mesh, facts)
    return {key: dict(layout.steps) for key, layout in zip(shapes, layouts, strict=True)}, notes


PLANS = [
    "LlamaConfig",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "MixtralConfig",
    "DeepseekV3Config",
    "GemmaConfig",
    "Gemma2Config",
    "MistralConfig",
    "Qwen2MoeConfig",
    "CohereConfig",
    "GPTNeoXConfig",
    "Llama4TextConfig",
]


@pytest.mark.parametrize("name", PLANS)
def test_kinds_are_those_of_transformers_own_plan(tmp_path, name):
    import transformers

    plan = getattr(transformers, name).base_model_tp_plan
    transposed = name == "Llama4TextConfig"
    for module, style in plan.items():
        module = "model." + module.replace("*", "3")
        if style == "moe_tp_experts":
            continue
        if ".experts." in module:
            up, down = ((8, 6, 20), (8, 10, 6)) if transposed else ((8, 20, 6), (8, 6, 10))
            pair = {module.rpartition(".")[0] + f".{side}_proj": s for side, s in (("gate_up", up), ("down", down))}
            found, notes = placed(tmp_path, pair, Mesh(tp=2))
            dim = {"packed_colwise": 1, "rowwise": 2, "packed_rowwise": 2, "colwise": 1}[style]
            want = StridedShard(dim, 2) if "packed" in style else Shard(dim)
            assert found[module] == {"tp": want} and not notes
        else:
            found, notes = placed(tmp_path, {f"{module}.weight": (8, 6), f"{module}.bias": (8,)}, Mesh(tp=2))
            want = {"colwise": ({"tp": Shard(0)}, {"tp": Shard(0)}), "rowwise": ({"tp": Shard(1)}, {})}.get(
                style, ({}, {})
            )
            assert style in ("colwise", "rowwise") or style.startswith("replicated")
            assert (found[f"{module}.weight"], found[f"{module}.bias"]) == want and not notes, module


@pytest.mark.parametrize(
    ("fqn", "kind"),
    [
        ("model.layers.3.block_sparse_moe.gate.weight", "same"),
        ("model.layers.3.block_sparse_moe.experts.5.w2.weight", "row"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", None),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "same"),
        ("model.layers.3.self_attn.kv_b_proj.weight", "column"),
        ("decoder.layers.3.mlp.experts.linear_fc2.weight12", "row"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "same"),
        ("decoder.layers.3.mlp.shared_experts.linear_fc1.weight", "fc1"),
        ("transformer.h.7.attn.c_attn.weight", "thirds transposed"),
        ("transformer.encoder.layers.1.self_attention.query_key_value.weight", None),
        ("layers.3.feed_forward.w2.weight", "row"),
        ("layers.3.moe.experts.w2", "experts row"),
        ("layers.3.moe.router.gate.weight", "same"),
        ("output.weight", "vocab"),
        ("bert.encoder.layer.3.output.dense.weight", "row"),
        ("model.layers.3.mixer.in_proj.weight", None),
        ("model.layers.3.linear_attn.out_proj.weight", None),
    ],
)
def test_kinds_of_names(fqn, kind):
    assert (kind_of(fqn) or (None,))[0] == kind


def megatron_checkpoint(tmp_path, model):
    tensors = dict(model.params)
    for name, states in model.states.items():
        tensors |= {f"optimizer.state.{name}.{s}": t for s, t in states.items() if s != "fp32_param"}
    save_file(tensors, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, {"tp": 2, "pp": 2}),
        ({"te": True}, {"tp": 2, "pp": 4, "dp": 2}),
        ({"experts": 4}, {"tp": 2, "pp": 2, "dp": 2, "ep": 2}),
        ({"tied": True}, {"pp": 2, "tp": 1}),
    ],
)
def test_every_rank_of_megatron_holds_what_megatron_cuts_for_it(tmp_path, options, sizes):
    model = megatron.Model(**options)
    ckpt = megatron_checkpoint(tmp_path, model)
    mesh = Mesh.megatron(**sizes)
    target = Target.of(ckpt, mesh)
    locals_ = assembled(ckpt.payloads, target.plan())
    stages = [megatron.even(model.layers, mesh.size("pp"))]
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        where = (at["tp"], at["pp"], at.get("ep", 0))
        (mine,) = megatron.held(model, stages, mesh.size("tp"), mesh.size("pp"), mesh.size("ep"), where)
        want = {}
        for one in mine:
            name = one.name if one.name in model.params else "embedding.word_embeddings.weight"
            want[name] = one.param
        got = {ckpt.catalog.keys[t]: value for (t, r), value in locals_.items() if r == rank}
        params = {key: value for key, value in got.items() if key in model.params}
        assert params.keys() == want.keys()
        for key, value in params.items():
            assert value.shape == tuple(want[key].shape)
            assert (value == want[key].view(torch.int16).numpy().view("u2")).all(), (rank, key)
        assert len(got) == 3 * len(params), "states are where their parameters are"


def test_states_scales_and_adapters_follow_their_parameter(tmp_path):
    column = "layers.0.self_attn.q_proj.weight"
    row = "layers.0.mlp.down_proj.weight"
    found, notes = placed(
        tmp_path,
        {
            column: (256, 512),
            f"{column}@exp_avg": (256, 512),
            f"{column}@step": (),
            f"{column}@scale": (2, 4),
            f"{column}@momentum": (256,),
            row: (256, 512),
            f"{row}@scale": (2, 4),
            f"{row}@lora_A": (8, 512),
            f"{row}@lora_B": (256, 8),
            "layers.0.self_attn.k_proj.weight": (256, 512),
            "layers.0.self_attn.k_proj.weight@scale": (256, 1),
            "layers.0.self_attn.v_proj.weight": (300, 512),
            "layers.0.self_attn.v_proj.weight@scale": (3, 4),
        },
        Mesh(fsdp=2, tp=2),
    )
    cut = {"tp": Shard(0), "fsdp": Shard(0)}
    assert found[column] == found[f"{column}@exp_avg"] == found[f"{column}@scale"] == cut
    assert list(found[column]) == ["tp", "fsdp"], "fsdp cuts what tp left"
    assert found[f"{column}@step"] == {}
    assert found[f"{column}@momentum"] == {"fsdp": Shard(0)}
    assert found[f"{row}@scale"] == found[f"{row}@lora_A"] == {"tp": Shard(1), "fsdp": Shard(0)}
    assert found[f"{row}@lora_B"] == {"fsdp": Shard(0)}
    assert found["layers.0.self_attn.k_proj.weight@scale"] == cut
    assert found["layers.0.self_attn.v_proj.weight@scale"] == {"fsdp": Shard(0)}
    assert notes == [
        f"kept whole because its parameter's sharding does not fit it: '{column}@momentum' and 1 more",
    ]


def test_block_scales_are_cut_only_between_blocks(tmp_path):
    key = "layers.0.self_attn.q_proj.weight"
    found, notes = placed(tmp_path, {key: (256, 512), f"{key}@scale": (2, 4)}, Mesh(tp=4))
    assert found[key] == {"tp": Shard(0)} and found[f"{key}@scale"] == {} and len(notes) == 1


def test_q_k_and_v_in_one_weight_are_cut_each_for_itself_where_heads_are_known(tmp_path):
    key = "model.layers.0.self_attn.qkv_proj.weight"
    facts = Geometry(heads=8, groups=2, head_dim=4)
    found, notes = placed(tmp_path, {key: (48, 16)}, Mesh(tp=2), facts=facts)
    assert found[key] == {"tp": PartedShard(0, (32, 8, 8))} and not notes
    found, notes = placed(tmp_path, {key: (48, 16)}, Mesh(tp=2))
    assert found[key] == {} and "an unknown number of heads" in notes[0]
    found, notes = placed(tmp_path, {key: (48, 16)}, Mesh(tp=4), facts=facts)
    assert found[key] == {"tp": PartedShard(0, (32, 8, 8))} and notes[0].startswith("2 key and value heads on tp=4:")


def test_heads_that_are_split_have_a_note_of_their_own(tmp_path):
    head = "model.layers.0.self_attn."
    shapes = {head + "q_proj.weight": (32, 16), head + "k_proj.weight": (8, 16), head + "v_proj.weight": (8, 16)}
    shapes |= {head + "o_proj.weight": (16, 32), "visual.blocks.0.attn.k_proj.weight": (12, 16)}
    facts = Geometry(heads=8, groups=2, head_dim=4)
    found, notes = placed(tmp_path, shapes, Mesh(tp=2), facts=facts)
    assert not notes
    same, notes = placed(tmp_path, shapes, Mesh(tp=4), facts=facts)
    told = (
        "on tp={}: ranks hold parts of heads; choose tp so that it divides the number of heads, or give these weights "
        "a rule with Replicate(): '{}'{}"
    )
    assert same == found and notes == ["2 key and value heads " + told.format(4, head + "k_proj.weight", " and 1 more")]
    _, notes = placed(tmp_path, shapes | {"lm_head.weight": (10, 16)}, Mesh(tp=3), facts=facts)
    assert notes == [
        "8 query heads " + told.format(3, head + "q_proj.weight", " and 1 more"),
        "2 key and value heads " + told.format(3, head + "k_proj.weight", " and 1 more"),
        "rows or columns not divisible by tp=3; split as torch.chunk does: 'lm_head.weight'",
    ]
    whole = Rules((PlacementRule("[kv]_proj", {"tp": Replicate()}),))
    found, _ = placed(tmp_path, shapes, Mesh(tp=4), whole, facts)
    assert found[head + "k_proj.weight"] == {"tp": Replicate()} and found[head + "q_proj.weight"] == {"tp": Shard(0)}
    grouped = {"decoder.layers.0.self_attention.linear_qkv.weight": (48, 16)}  # two groups of 4 + 1 + 1 heads
    assert not placed(tmp_path, grouped, Mesh(tp=2), facts=facts)[1]
    assert "2 query groups on tp=4" in placed(tmp_path, grouped, Mesh(tp=4), facts=facts)[1][0]
    third = {"transformer.h.0.attn.c_attn.weight": (16, 48)}
    equal = Geometry(heads=4, groups=4, head_dim=4)
    assert not placed(tmp_path, third, Mesh(tp=4), facts=equal)[1]
    assert "4 query heads on tp=8" in placed(tmp_path, third, Mesh(tp=8), facts=equal)[1][0]


def test_stacks_of_experts_are_told_by_their_shapes(tmp_path):
    head = "model.layers.0.mlp.experts."
    mesh = Mesh(ep=2, tp=2)
    plain, _ = placed(tmp_path, {head + "gate_up_proj": (8, 24, 16), head + "down_proj": (8, 16, 12)}, mesh)
    assert plain[head + "gate_up_proj"] == {"ep": Shard(0), "tp": StridedShard(1, 2)}
    assert plain[head + "down_proj"] == {"ep": Shard(0), "tp": Shard(2)}
    oss, notes = placed(
        tmp_path,
        {
            head + "gate_up_proj": (8, 16, 24),
            head + "gate_up_proj_bias": (8, 24),
            head + "down_proj": (8, 12, 16),
            head + "down_proj_bias": (8, 16),
        },
        mesh,
    )
    assert oss[head + "gate_up_proj"] == {"ep": Shard(0), "tp": Shard(2)}, "gate and up row by row"
    assert oss[head + "gate_up_proj_bias"] == {"ep": Shard(0), "tp": Shard(1)}
    assert oss[head + "down_proj"] == {"ep": Shard(0), "tp": Shard(1)}
    assert oss[head + "down_proj_bias"] == {"ep": Shard(0)} and len(notes) == 1
    odd, notes = placed(tmp_path, {head + "gate_up_proj": (8, 16, 16), head + "down_proj": (8, 16, 16)}, mesh)
    assert odd[head + "down_proj"] == odd[head + "gate_up_proj"] == {"ep": Shard(0)}
    assert notes == [
        "experts whose input and output axes cannot be distinguished; replicated on every tp rank: "
        f"'{head}gate_up_proj' and 1 more"
    ]
    stack = "decoder.layers.0.mlp.experts.experts."
    for rows, want in ((24, StridedShard(1, 2)), (12, Shard(1))):
        shapes = {stack + "linear_fc1.weight": (8, rows, 16), stack + "linear_fc2.weight": (8, 16, 12)}
        found, notes = placed(tmp_path, shapes, mesh)
        assert found[stack + "linear_fc1.weight"] == {"ep": Shard(0), "tp": want}
        assert found[stack + "linear_fc2.weight"] == {"ep": Shard(0), "tp": Shard(2)} and not notes


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"model_type": "gpt_oss"}, Shard),
        ({"architectures": ["GptOssForCausalLM"]}, Shard),
        ({"model_type": "some_vl", "text_config": {"model_type": "gpt_oss"}}, Shard),
        ({"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text"}}, StridedShard),
        ({"model_type": "openai_privacy_filter", "architectures": 7, "text_config": 7}, StridedShard),
    ],
)
def test_the_configuration_says_whether_gate_and_up_are_interleaved(tmp_path, config, want):
    head = "model.layers.0.mlp.experts."
    pair = {head + "gate_up_proj": (8, 16, 24), head + "down_proj": (8, 12, 16)}
    facts = geometry({"config": config})
    for shapes in (pair, pair | {head + "gate_up_proj_bias": (8, 24)}):
        found, notes = placed(tmp_path, shapes, Mesh(tp=2), facts=facts)
        assert isinstance(found[head + "gate_up_proj"]["tp"], want) and not notes
        assert all(isinstance(found[key]["tp"], want) for key in shapes if "gate_up" in key)
    turned = {head + "gate_up_proj": (8, 24, 16), head + "down_proj": (8, 16, 12)}
    found, notes = placed(tmp_path, turned, Mesh(tp=2), facts=facts)
    assert isinstance(found[head + "gate_up_proj"]["tp"], want) and not notes
    fc1 = {name.replace("gate_up_proj", "experts.linear_fc1.weight"): shape for name, shape in turned.items()}
    fc1 = {name.replace("down_proj", "experts.linear_fc2.weight"): shape for name, shape in fc1.items()}
    fc1 = {name.replace("model.", "decoder."): shape for name, shape in fc1.items()}
    found, notes = placed(tmp_path, fc1, Mesh(tp=2), facts=facts)
    assert next(iter(found.values())) == {"tp": StridedShard(1, 2)} and not notes, "Megatron's are concatenated"


def test_without_a_configuration_the_order_of_gate_and_up_is_noted(tmp_path):
    head = "model.layers.0.mlp.experts."
    pair = {head + "gate_up_proj": (8, 16, 24), head + "down_proj": (8, 12, 16)}
    biased = pair | {head + "gate_up_proj_bias": (8, 24)}
    llama = {key.replace("mlp", "feed_forward"): shape for key, shape in pair.items()}
    turned = {head + "gate_up_proj": (8, 24, 16), head + "down_proj": (8, 16, 12)}
    told = "no configuration states the model; gate and up are taken to be"
    for shapes, want, words in (
        (pair, StridedShard(2, 2), [f"{told} concatenated, as in most models: '{head}gate_up_proj'"]),
        (biased, Shard(2), [f"{told} interleaved, as in gpt-oss: '{head}gate_up_proj' and 1 more"]),
        (llama, StridedShard(2, 2), []),
        (turned, StridedShard(1, 2), []),
    ):
        found, notes = placed(tmp_path, shapes, Mesh(tp=2))
        assert next(iter(found.values())) == {"tp": want} and notes == words
        assert not placed(tmp_path, shapes, Mesh(ep=2))[1], "of no account where nothing cuts gate and up"


def test_experts_of_their_own_go_whole_to_one_rank(tmp_path):
    keys = {f"model.layers.0.mlp.experts.{e}.down_proj.weight": (4, 6) for e in range(6)}
    found, _ = placed(tmp_path, keys, Mesh(ep=3))
    assert [found[key] for key in keys] == [{"ep": Only((e // 2,))} for e in range(6)]


def test_layers_are_spread_over_stages_evenly_or_as_given(tmp_path):
    keys = {f"model.layers.{n}.mlp.up_proj.weight": (4, 4) for n in range(10)}
    ends = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}
    found, notes = placed(tmp_path, keys | ends, Mesh(pp=4))
    assert [found[key]["pp"].coordinates[0] for key in keys] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert [found[key]["pp"] for key in ends] == [Only((0,)), Only((3,)), Only((3,))] and not notes
    found, _ = placed(tmp_path, keys | ends, Mesh(pp=3), Rules(layers=(1, 9, 0)))
    assert [found[key]["pp"].coordinates[0] for key in keys] == [0] + [1] * 9
    more = {"mtp.layers.0.up_proj.weight": (4, 4), "vision.blocks.0.fc1.weight": (4, 4), "strange": (3,)}
    found, notes = placed(tmp_path, keys | more, Mesh(pp=2))
    assert found["mtp.layers.0.up_proj.weight"] == {"pp": Only((1,))}
    assert found["vision.blocks.0.fc1.weight"] == {"pp": Only((0,))} and found["strange"] == {} and len(notes) == 3


def test_stages_without_layers_are_noted(tmp_path):
    keys = {f"model.layers.{n}.mlp.up_proj.weight": (4, 4) for n in range(3)}
    assert not placed(tmp_path, keys, Mesh(pp=3))[1]
    assert placed(tmp_path, keys, Mesh(pp=4))[1] == ["3 layers on pp=4: stage 3 has no layers: 'model.layers'"]
    assert placed(tmp_path, keys, Mesh(pp=6))[1] == ["3 layers on pp=6: stages 3 to 5 have no layers: 'model.layers'"]
    assert not placed(tmp_path, keys, Mesh(pp=4), Rules(layers=(0, 1, 1, 1)))[1], "as the rules say"


def test_rules_by_pattern_win_axis_by_axis(tmp_path):
    key = "model.layers.0.self_attn.q_proj.weight"
    shapes = {key: (8, 8), f"{key}@exp_avg": (8, 8), f"{key}@step": (), "model.norm.weight": (8,)}
    mesh = Mesh(pp=1, fsdp=2, tp=2)
    rules = Rules((PlacementRule(r"q_proj", {"tp": Shard(1)}),))
    found, _ = placed(tmp_path, shapes, mesh, rules)
    assert found[key] == found[f"{key}@exp_avg"] == {"tp": Shard(1), "fsdp": Shard(0)}
    assert found[f"{key}@step"] == {} and found["model.norm.weight"] == {"fsdp": Shard(0)}
    found, _ = placed(tmp_path, shapes, mesh, Rules((PlacementRule("q_proj", {"fsdp": Flat()}, role="exp_avg"),)))
    assert found[key] == {"tp": Shard(0), "fsdp": Shard(0)}
    assert found[f"{key}@exp_avg"] == {"tp": Shard(0), "fsdp": Flat()}
    whole = PlacementRule("", [Replicate(), StridedShard(0, 2), Shard(0)])
    found, _ = placed(tmp_path, {key: (8, 8)}, mesh, Rules((whole,)))
    assert list(found[key].items()) == [("pp", Replicate()), ("fsdp", StridedShard(0, 2)), ("tp", Shard(0))]
    found, _ = placed(tmp_path, {key: (8, 8)}, Mesh(mine=2), Rules((PlacementRule("", {"mine": Shard(1)}),)))
    assert found[key] == {"mine": Shard(1)}


def test_fsdp_cuts_what_is_cut_in_training(tmp_path):
    shapes = {"w": (5, 4), "b": (5,), "w@step": (), "m@buffer": (5,)}
    for mesh, rules in ((Mesh(fsdp=2), None), (Mesh(dp_replicate=2, dp_shard=2), None), (Mesh(dp=3), Rules.fsdp())):
        found, notes = placed(tmp_path, shapes, mesh, rules)
        axis = mesh.axes[-1]
        assert found == {"w": {axis: Shard(0)}, "b": {axis: Shard(0)}, "w@step": {}, "m@buffer": {}} and not notes
    assert placed(tmp_path, shapes, Mesh(dp=3))[0]["w"] == {}, "dp alone holds copies"


def test_what_is_not_known_is_copied_and_said(tmp_path):
    found, notes = placed(tmp_path, {"a.b.c": (4, 4), "a.b.d": (4,)}, Mesh(tp=2))
    assert found == {"a.b.c": {}, "a.b.d": {}}
    assert notes == ["unknown name; replicated on every tp rank: 'a.b.c' and 1 more"]
    _, notes = placed(tmp_path, {"layers.0.wq.weight": (5, 4)}, Mesh(tp=2))
    assert notes == ["rows or columns not divisible by tp=2; split as torch.chunk does: 'layers.0.wq.weight'"]


@pytest.mark.parametrize(
    ("mesh", "rules", "told"),
    [
        (Mesh(tpp=2), Rules(), "no rule for mesh axis 'tpp'"),
        (Mesh(tp=2), Rules((PlacementRule("", {"pp": Shard(0)}),)), "'pp', which"),
        (Mesh(tp=2), Rules((PlacementRule("", [Shard(0), Shard(0)]),)), "2 placements for"),
        (Mesh(tp=2), Rules((PlacementRule("(", {"tp": Shard(0)}),)), "not a valid regular expression"),
        (Mesh(tp=2), Rules(layers=(1, 1)), "no axis 'pp'"),
        (Mesh(pp=2), Rules(layers=(1, 1)), "do not divide the 1 layer "),
    ],
)
def test_rules_that_do_not_fit_are_refused(tmp_path, mesh, rules, told):
    with pytest.raises(UsageError, match=told):
        placed(tmp_path, {"layers.0.wq.weight": (4, 4)}, mesh, rules)


def test_stages_need_layers(tmp_path):
    with pytest.raises(UsageError, match="contains a layer number"):
        placed(tmp_path, {"w": (4, 4)}, Mesh(pp=2))
    found, _ = placed(tmp_path, {"w": (4, 4)}, Mesh(pp=2), Rules((PlacementRule("w", {"pp": Only((1,))}),)))
    assert found == {"w": {"pp": Only((1,))}}
