"""Place every tensor of a checkpoint by its name, shape and role, and note what is unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from workbench.core.mesh.layout import PlacementRule, Steps, TensorLayout
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Only, PartedShard, Placement, Replicate, Shard, StridedShard
from workbench.export.sharding import kinds
from workbench.export.sharding.follow import follow
from workbench.export.sharding.stages import Stages
from workbench.names.frameworks import Geometry
from workbench.names.weights import is_gated, parse

#: Roles by preference from which a parameter's shape is taken, if it has several tensors.
_SHAPE_FROM = ("param", "master", "exp_avg", "exp_avg_sq", "momentum", "ema")
_STATELESS = ("buffer", "other")  #: roles of tensors that FSDP does not cut
PACKED = (".qweight", ".weight_packed", "_blocks")  #: ends of keys of quantised weights


class Placing:
    """One run over a checkpoint's tensors; use it through :class:`workbench.export.sharding.rules.Rules`."""

    def __init__(
        self,
        explicit: Sequence[PlacementRule],
        layers: tuple[int, ...] | None,
        mesh: Mesh,
        does: Mapping[str, str | None],
        facts: Geometry,
    ) -> None:
        """Create the placing; ``does`` states for each axis of the mesh whether it is ``tp``, ``ep``, ``pp``, ``shard``
        or ``copies``.
        """
        self.explicit, self.layers, self.mesh, self.does, self.facts = explicit, layers, mesh, does, facts
        self.sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.experts = 0
        self.stages: Stages | None = None
        self.counts: Counter[str] = Counter()
        self.example: dict[str, str] = {}
        self.known: dict[str, tuple[Steps, str]] = {}

    def run(
        self, keys: Sequence[str], fqns: Sequence[str | None], roles: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[list[TensorLayout], list[str]]:
        """Return the layout of every tensor, and notes about doubtful ones."""
        self.shapes = _parameter_shapes(fqns, roles, shapes)
        names = dict.fromkeys(fqn for fqn in fqns if fqn is not None)
        self.experts = 1 + max((e for name in names if (e := parse(name).expert) is not None), default=-1)
        pp = self.sizes["pp"] if self.does.get("pp") == "pp" else 1
        placed = any("pp" in dict(rule.placements) for rule in self.explicit if isinstance(rule.placements, Mapping))
        if pp > 1 and not (placed and self.layers is None and all(parse(name).layer is None for name in names)):
            self.stages = Stages(list(names), pp, self.layers, self._note)
        layouts = []
        made: dict[tuple[Steps, str], TensorLayout] = {}
        for key, fqn, role, shape in zip(keys, fqns, roles, shapes, strict=True):
            found = self._layout(key, fqn, role, shape)
            layouts.append(made.setdefault(found, TensorLayout(*found)))
        notes = [
            f"{what}: {self.example[what]!r}" + (f" and {count - 1:,} more" if count > 1 else "")
            for what, count in self.counts.items()
        ]
        return layouts, notes

    # ---- one tensor ----------------------------------------------------------------------------------------------

    def _layout(self, key: str, fqn: str | None, role: str, shape: tuple[int, ...]) -> tuple[Steps, str]:
        base, why = self._of_parameter(fqn, key, role, shape)
        rule = next((rule for rule in self.explicit if rule.matches(key, fqn, role)), None)
        cut = shape and role not in _STATELESS and fqn is not None
        shards: Steps = tuple((axis, Shard(0)) for axis in self.mesh.axes if cut and self.does[axis] == "shard")
        if rule is None:
            return base + shards, why
        steps, complete = rule.steps(self.mesh)
        own = self.shapes.get(fqn or "", shape)
        mine = follow(own, shape, role, steps, self.sizes)
        if mine is None:
            self._note("kept whole because the placements of its parameter do not fit its shape", key)
            mine = tuple(step for step in steps if isinstance(step[1], Only))
        why = f"rule {rule.pattern!r}"
        if complete:
            return mine, why
        named = {axis for axis, _ in steps}
        return (
            *(step for step in base if step[0] not in named),
            *mine,
            *(step for step in shards if step[0] not in named),
        ), why

    def _of_parameter(self, fqn: str | None, key: str, role: str, shape: tuple[int, ...]) -> tuple[Steps, str]:
        """Return how the model's axes (tp, ep, pp) shard a tensor."""
        if fqn is None:
            if shape and self.sizes.get("tp", 1) * self.sizes.get("ep", 1) * self.sizes.get("pp", 1) > 1:
                self._note("belongs to no named parameter; replicated on every rank", key)
            return (), "no parameter"
        if fqn not in self.known:
            self.known[fqn] = self._parameter(fqn)
        steps, why = self.known[fqn]
        if role.startswith("lora_"):
            return self._adapter(fqn, role, shape), f"{role} of {why}"
        packed = role == "param" and key.endswith(PACKED)  # a quantised weight, whose axes are not its parameter's
        mine = None if packed else follow(self.shapes.get(fqn, shape), shape, role, steps, self.sizes)
        if mine is None or any(_dim(placement) >= len(shape) for _, placement in mine):
            self._note("kept whole because its parameter's sharding does not fit it", key)
            mine = tuple(step for step in steps if isinstance(step[1], Only))
        return mine, why if role == "param" else f"{role} of {why}"

    def _parameter(self, fqn: str) -> tuple[Steps, str]:
        shape = self.shapes.get(fqn)  # it is not known for an adapter's weight
        steps: list[tuple[str, Placement]] = []
        if self.stages is not None and (stage := self.stages.of(fqn)) is not None:
            steps.append(("pp", Only(stage)))
        kind, tp, bias = self._kind(fqn, shape or ())
        expert = parse(fqn).expert
        if self.sizes.get("ep", 1) > 1 and self.does["ep"] == "ep":
            if kind.startswith("experts"):
                steps.append(("ep", Shard(0)))
            elif expert is not None:
                each = -(-self.experts // self.sizes["ep"])
                steps.append(("ep", Only((expert // each,))))
        if self.sizes.get("tp", 1) > 1 and self.does["tp"] == "tp" and not isinstance(tp, Replicate):
            if shape is not None and _dim(tp) >= len(shape):
                self._note("has too few axes for its kind; replicated on every tp rank", fqn)
            else:
                steps.append(("tp", tp))
                self._check_division(fqn, shape, tp)
        return tuple(steps), f"{kind} bias" if bias else kind

    def _kind(self, fqn: str, shape: tuple[int, ...]) -> tuple[str, Placement, bool]:
        """Return the kind, the placement along tp, and whether it is a bias."""
        found = kinds.kind_of(fqn)
        if found is None:
            if shape and self.sizes.get("tp", 1) > 1:
                self._note("unknown name; replicated on every tp rank", fqn)
            return "unknown", Replicate(), False
        kind, bias = found
        if kind == "qkv":
            parts = self._qkv_parts(shape)
            if parts is None:
                self._note("fused q, k and v with an unknown number of heads; replicated on every tp rank", fqn)
            return kind, Replicate() if parts is None else PartedShard(0, parts), bias
        if kind == "fc1":
            kind = "gate_up" if is_gated(fqn, self.shapes) else "column"
        if kind.startswith("stack "):
            return self._stack(fqn, kind, bias)
        return kind, kinds.CUTS[kind][bias], bias

    def _stack(self, fqn: str, kind: str, bias: bool) -> tuple[str, Placement, bool]:
        """Place stacks of experts; the shapes of the pair determine which axis is which."""
        first, second = ("linear_fc1", "linear_fc2") if kind == "stack fc1" else ("gate_up_proj", "down_proj")
        name = fqn.removesuffix("_bias")
        up = self.shapes.get(name.replace(second, first))
        down = self.shapes.get(name.replace(first, second))
        if up is None or down is None or len(up) != 3 or len(down) != 3:
            arrangement = None
        elif up[2] == down[1] and up[1] == 2 * down[2]:
            arrangement = "plain"
        elif up[2] == down[1] and up[1] == down[2] and kind == "stack fc1":
            arrangement = "single"
        else:
            arrangement = "transposed" if up[1] == down[2] and up[2] == 2 * down[1] else None
        if arrangement is None:
            self._note("experts whose input and output axes cannot be distinguished; replicated on every tp rank", fqn)
            return "experts same", Replicate(), bias
        if first not in name:
            placed: Placement = Replicate() if bias else Shard(1 if arrangement == "transposed" else 2)
            return "experts row", placed, bias
        if arrangement == "single":
            return "experts column", Shard(1), bias
        dim = 2 if arrangement == "transposed" and not bias else 1
        # of interleaved rows, a range holds as much of gate as of up
        mixed = kind != "stack fc1" and self._interleaved(name, arrangement)
        return "experts gate_up", Shard(dim) if mixed else StridedShard(dim, 2), bias

    def _interleaved(self, name: str, arrangement: str) -> bool:
        """Return whether gate and up alternate in a stack of experts, as they do in gpt-oss."""
        if self.facts.interleaved is not None:
            return self.facts.interleaved
        biased = f"{name}_bias" in self.shapes
        # Llama 4 and the stacks with rows of outputs are concatenated whatever the model
        if self.sizes.get("tp", 1) > 1 and (biased or (arrangement == "transposed" and ".feed_forward." not in name)):
            order = "interleaved, as in gpt-oss" if biased else "concatenated, as in most models"
            self._note(f"no configuration states the model; gate and up are taken to be {order}", name)
        return biased

    def _adapter(self, fqn: str, role: str, shape: tuple[int, ...]) -> Steps:
        """Place LoRA factors: B has the rows of its weight, A its columns; the rank is never cut."""
        steps, _ = self.known[fqn]
        kept = []
        for axis, placement in steps:
            if isinstance(placement, Only) or (
                len(shape) == 2 and getattr(placement, "dim", None) == {"lora_B": 0, "lora_A": 1}.get(role)
            ):
                kept.append((axis, placement))
        return tuple(kept)

    # ---- facts of the model --------------------------------------------------------------------------------------

    def _qkv_parts(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        heads, groups, rows = self.facts.heads, self.facts.groups, self.facts.head_dim
        if heads is None or groups is None or rows is None or not shape or shape[0] != (heads + 2 * groups) * rows:
            return None
        return heads * rows, groups * rows, groups * rows

    def _check_division(self, fqn: str, shape: tuple[int, ...] | None, placement: Placement) -> None:
        tp = self.sizes["tp"]
        if shape is not None and (heads := self._split_heads(fqn, shape, placement)):
            self._note(
                f"{heads} on tp={tp}: ranks hold parts of heads; choose tp so that it divides the number of heads, or "
                "give these weights a rule with Replicate()",
                fqn,
            )
            return
        if isinstance(placement, PartedShard):
            uneven = any(part % tp for part in placement.parts)
        else:
            pieces = tp * (placement.split_factor if isinstance(placement, StridedShard) else 1)
            uneven = shape is not None and shape[_dim(placement)] % pieces != 0
        if uneven:
            self._note(f"rows or columns not divisible by tp={tp}; split as torch.chunk does", fqn)

    def _split_heads(self, fqn: str, shape: tuple[int, ...], placement: Placement) -> str | None:
        """Return the heads of a weight that are split between ranks, in words."""
        heads, groups, tp = self.facts.heads, self.facts.groups, self.sizes["tp"]
        if heads is None or groups is None:
            return None
        weight, length = parse(fqn), shape[_dim(placement)]
        query, key_value = (heads, "query heads"), (groups, "key and value heads")
        parts: list[tuple[int, tuple[int, str]]] = []  # length, and the heads that it consists of
        if isinstance(placement, PartedShard):
            parts = [(placement.parts[0], query), (placement.parts[1], key_value)]
        elif weight.kind == "qkv":
            parts = [(length, (groups, "query groups")) if weight.grouped else (length // 3, query)]
        elif weight.kind in ("q", "q_b", "o"):
            parts = [(length, query)]
        elif weight.kind in ("k", "v", "kv_b"):
            parts = [(length, key_value)]
        split = []
        for rows, (count, name) in parts:
            fits = rows and rows % (count * (self.facts.head_dim or 1)) == 0  # not so for other towers of the model
            if fits and -(-rows // tp) % (rows // count):
                split.append(f"{count} {name}")
        return " and ".join(split) or None

    def _note(self, what: str, name: str) -> None:
        self.counts[what] += 1
        self.example.setdefault(what, name)


def _parameter_shapes(
    fqns: Sequence[str | None], roles: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter: its own, or that of a state of the same shape."""
    best: dict[str, tuple[int, tuple[int, ...]]] = {}
    for fqn, role, shape in zip(fqns, roles, shapes, strict=True):
        if fqn is not None and role in _SHAPE_FROM:
            order = _SHAPE_FROM.index(role)
            if fqn not in best or order < best[fqn][0]:
                best[fqn] = order, shape
    return {fqn: shape for fqn, (_, shape) in best.items()}


def _dim(placement: Placement) -> int:
    """Return the axis that a placement cuts, or -1."""
    return placement.dim if isinstance(placement, Shard | StridedShard | PartedShard) else -1
