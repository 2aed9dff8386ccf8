"""A checkpoint under Hugging Face's names and in its shapes, without another checkpoint to compare with.

::

    decoder.layers.0.self_attention.linear_qkv.weight ──┬─▶ model.layers.0.self_attn.q_proj.weight
      TP 2 × PP 2, grouped by query group               ├─▶ model.layers.0.self_attn.k_proj.weight
                                                        └─▶ model.layers.0.self_attn.v_proj.weight
    args  num_query_groups rotary_base swiglu …  ─────────▶ config.json

Box arithmetic on the catalog: no weight is read or copied. Anything that cannot be determined for certain is an error
that names it, never a guess: a model with one layer in the wrong order of rows loads, and generates nonsense.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from workbench.checkpoint import Checkpoint
from workbench.core.rebox import ComposedBox, Composition, compose
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.export.hf.facts import ModelFacts, facts
from workbench.export.hf.models import is_mixtral, misfit, model_config
from workbench.export.hf.names import Dialect, dialect, hf_name, is_atom
from workbench.names.frameworks import Geometry
from workbench.names.weights import parse

_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")
_COMPUTED = ("rope.freqs", "rotary_emb.inv_freq")  #: tables that old versions stored
_WEIGHTS = ("bfloat16", "float16", "float32", "float64")
_UNKNOWN = "not a weight of the Llama family"
MAX_NAMED = 3  #: maximum number of tensors that an error names


@dataclass(frozen=True, eq=False)
class Renamed:
    """Attributes:
    ckpt: the same bytes under Hugging Face's names, lazy like any checkpoint.
    config: ``config.json`` of the model; ``None`` if a required fact is not stored, or no class has these
        weights.
    notes: what was cut, and why there is no config.
    left: stored keys that have no place in the model, and why.
    """

    ckpt: Checkpoint
    config: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def as_hf(ckpt: Checkpoint, config: Mapping[str, Any] | None = None) -> Renamed:
    """Rename, cut and permute the parameters of a checkpoint as transformers' Llama, Qwen and Mixtral expect them.

    Megatron (legacy, ``torch_dist``, under DeepSpeed), Meta and torchtitan, PaddleNLP, and Hugging Face's own names
    under the wrappers of FSDP, DCP and others.

    Args:
        config: fields of the model's ``config.json``, for facts that the checkpoint does not store (mainly rows per
            head); with a ``model_type`` it is the complete config of the result.

    Raises:
        UsageError: the names follow no known convention, or a parameter's place cannot be determined for certain.
    """
    if "param" not in ckpt.roles:
        raise UsageError(f"there is no parameter to rename; stored roles: {', '.join(sorted(set(ckpt.roles)))}")
    known = facts(ckpt, config)
    found = dialect(ckpt)
    if found is None:
        raise UsageError(
            f"the parameters follow no known naming convention, such as {_examples(ckpt)}; rename them with a mapping "
            "or a function, or keep their names with rename='fqn'"
        )
    name, parts_of = found
    own = name == "HuggingFace"
    stored = ckpt.objects.get("config") if own else None
    whole = dict(stored) if isinstance(stored, Mapping) else None
    if config is not None and "model_type" in config:
        whole = dict(config)
    if own and _is_hf_already(ckpt):
        return Renamed(ckpt, whole, ["the names already are Hugging Face's"])
    if name == "Megatron" and known.refused:
        raise UsageError(f"Hugging Face's classes order rows differently: {'; '.join(known.refused)}")
    atoms, left = _atoms(ckpt, parts_of, known)
    shapes = {atom: _shape(atom, pieces) for atom, pieces in atoms.items()}
    stacked = any(len(piece.axes) != len(piece.sizes) for pieces in atoms.values() for piece in pieces)
    if not own or stacked:
        _check(ckpt, atoms, shapes)
        mixtral = is_mixtral(set(shapes))
    else:  # its names stay, whatever its class
        mixtral = any(fqn is not None and ".block_sparse_moe." in fqn for fqn in ckpt.fqns)
    notes = _cut_padding(atoms, shapes, known.geometry.vocab) if name == "Megatron" else []
    names = {atom: hf_name(atom, mixtral) for atom in atoms}
    targets = [Composition(names[atom], shapes[atom], pieces, names[atom]) for atom, pieces in atoms.items()]
    made = ckpt.derive(compose(ckpt.catalog, targets))
    if whole is not None:
        return Renamed(made, whole, notes, left)
    dtypes = {made.catalog.dtype_of(tensor).name for tensor in range(len(made))}
    model, why = model_config(shapes, known, dtypes.pop() if len(dtypes) == 1 else None)
    return Renamed(made, model, [*notes, *why], left)


def _atoms(
    ckpt: Checkpoint, parts_of: Dialect, known: ModelFacts
) -> tuple[dict[str, list[ComposedBox]], dict[str, str]]:
    """Return the pieces of every atom, and the tensors that have no place."""
    rows = [ckpt.catalog.shape_of(t)[0] for t in range(len(ckpt)) if _is_embedding(ckpt, t)]
    geometry = known.geometry.filled(Geometry(vocab=rows[0] if rows else None))
    tied = known.fields.get("tie_word_embeddings") is True
    parts = Counter(fqn for fqn, role in zip(ckpt.fqns, ckpt.roles, strict=True) if role == "param")
    atoms: dict[str, list[ComposedBox]] = defaultdict(list)
    left: dict[str, str] = {}
    refused: dict[str, str] = {}
    for tensor, (key, fqn, role) in enumerate(zip(ckpt.catalog.keys, ckpt.fqns, ckpt.roles, strict=True)):
        if role == "buffer" or (fqn or "").endswith(_COMPUTED):
            left[key] = "computed by the model from its config"
        elif role.startswith("lora_") or role == "ia3_l":
            refused[key] = f"{role} of an adapter that is not merged into its weight"
        elif fqn is None or role != "param":
            left[key] = f"{role}: only parameters are part of a Hugging Face model"
        elif ckpt.catalog.dtype_of(tensor).name not in _WEIGHTS:
            refused[key] = f"quantised: stored as {ckpt.catalog.dtype_of(tensor).name}"
        elif parts[fqn] > 1:
            refused[key] = f"one of {parts[fqn]} parts that the checkpoint does not join"
        else:
            found = parts_of(tensor, fqn, ckpt.catalog.shape_of(tensor), geometry)
            if isinstance(found, str):
                refused[key] = found
            elif not found:
                refused[key] = _UNKNOWN
            elif tied and found[0].atom == "lm_head.weight":
                left[key] = "tied to the embedding"
            else:
                for part in found:
                    atoms[part.atom].append(part.piece)
    if refused:
        raise UsageError(_refusal(refused))
    return atoms, left


def _check(ckpt: Checkpoint, atoms: Mapping[str, list[ComposedBox]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every name is known and every shape matches its name, because rows move."""
    unknown = {piece.tensor for atom, pieces in atoms.items() if not is_atom(atom) for piece in pieces}
    if unknown:
        raise UsageError(_refusal({ckpt.catalog.keys[tensor]: _UNKNOWN for tensor in sorted(unknown)}))
    wrong = misfit(shapes)
    if wrong is not None:
        raise UsageError(f"the weights' shapes contradict their names: {wrong}")


def _refusal(refused: Mapping[str, str]) -> str:
    reasons = "; ".join(f"{key!r}: {why}" for key, why in list(refused.items())[:MAX_NAMED])
    more = f" (and {len(refused) - MAX_NAMED} more)" if len(refused) > MAX_NAMED else ""
    return f"{plural(len(refused), 'parameter')} cannot be renamed for Hugging Face: {reasons}{more}"


def _shape(atom: str, pieces: list[ComposedBox]) -> tuple[int, ...]:
    """Return the shape that pieces make up together; they must fill it, each element once."""
    taken = [[1 if a is None else piece.sizes[a] for a in piece.axes] for piece in pieces]
    shape = tuple(
        max(piece.at[axis] + sizes[axis] for piece, sizes in zip(pieces, taken, strict=True))
        for axis in range(len(taken[0]))
    )
    have = sum(prod(sizes) for sizes in taken)
    if have != prod(shape):
        raise UsageError(f"{atom}: its boxes contain {have:,} of {prod(shape):,} elements")
    return shape


def _cut_padding(
    atoms: dict[str, list[ComposedBox]], shapes: dict[str, tuple[int, ...]], vocab: int | None
) -> list[str]:
    """Remove the rows that only pad the vocabulary, if its true size is stored; in place."""
    notes = []
    for atom in _VOCABULARY:
        rows = shapes[atom][0] if atom in shapes else 0
        if vocab is None and rows:
            notes.append(
                f"{hf_name(atom, False)} keeps its {plural(rows, 'row')}: the number of padding rows is not stored"
            )
        if vocab is None or rows <= vocab:
            continue
        atoms[atom] = [_clipped(piece, vocab) for piece in atoms[atom]]
        shapes[atom] = (vocab, *shapes[atom][1:])
        notes.append(
            f"{hf_name(atom, False)} has {plural(vocab, 'row')}: {plural(rows - vocab, 'row')} that pad the "
            "vocabulary are removed"
        )
    return notes


def _clipped(piece: ComposedBox, rows: int) -> ComposedBox:
    """Return a piece without the rows beyond the target's first ``rows``."""
    axis = piece.axes[0]
    assert axis is not None
    sizes = list(piece.sizes)
    sizes[axis] = max(min(sizes[axis], rows - piece.at[0]), 0)
    return replace(piece, sizes=tuple(sizes))


def _is_embedding(ckpt: Checkpoint, tensor: int) -> bool:
    weight = parse(ckpt.fqns[tensor] or "")
    matrix = ckpt.roles[tensor] == "param" and len(ckpt.catalog.shape_of(tensor)) == 2
    return matrix and (weight.kind, weight.leaf) == ("embed", "weight")


def _is_hf_already(ckpt: Checkpoint) -> bool:
    """Return whether the stored keys are those that ``save_pretrained`` writes, so nothing must be renamed."""
    if any(key != fqn for key, fqn, role in zip(ckpt, ckpt.fqns, ckpt.roles, strict=True) if role == "param"):
        return False
    config = ckpt.objects.get("config")
    if isinstance(config, Mapping) and "transformers_version" in config:
        return True
    stacked = any(".experts.gate_up_proj" in key for key in ckpt)  # names in memory, not on disk
    return not stacked and any(key.startswith("model.") for key in ckpt)


def _examples(ckpt: Checkpoint) -> str:
    names = [fqn or key for key, fqn, role in zip(ckpt, ckpt.fqns, ckpt.roles, strict=True) if role == "param"]
    return ", ".join(map(repr, names[:MAX_NAMED]))
