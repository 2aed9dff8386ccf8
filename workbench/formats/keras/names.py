"""The meaning of Keras' paths: variables by the layers' own names, and the optimizer's by the variables.

::

    layers/dense_1/vars/0             fc2.kernel        class and counter; "vars" has the attribute name="fc2", and
                                                        config.json says that it is a Dense, whose first is its kernel
    layers/lstm/cell/vars/1           rnn.lstm_cell.recurrent_kernel
    optimizer/vars/0, 1               step, learning rate
    optimizer/vars/2, 3, 4, 5, …      exp_avg and exp_avg_sq of each trainable variable, in the model's order

    model_weights/fc2/fc2/kernel      fc2.kernel        a whole model in HDF5: the variable's own path
    optimizer_weights/adam/fc2_kernel_momentum          exp_avg of fc2.kernel
    optimizer_weights/Adam/fc2/kernel/m:0               … of Keras 2

Variables without proof keep their paths: of a class that is not Keras' own, of a layer whose number of variables
differs from its class', or slots whose number or shapes do not fit the variables.

Sources: keras 3.15 ``saving/saving_lib.py``, ``legacy/saving/legacy_h5_format.py``, ``optimizers/adam.py`` and the
layers' ``build``; Keras 2.15 ``optimizer_v2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DEPTH = 32  #: maximum nesting of layers
_VARS = re.compile(r"(?:(.+)/)?vars/(\d{1,6})", re.DOTALL)
_KERNEL = "kernel", "bias?use_bias"
_RECURRENT = "kernel", "recurrent_kernel", "bias?use_bias"
_NORM = "gamma?scale", "beta?center"
#: Class → variables in stored order; after "?", the setting that a variable requires.
VARIABLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "Dense",
            "Conv1D",
            "Conv2D",
            "Conv3D",
            "Conv1DTranspose",
            "Conv2DTranspose",
            "Conv3DTranspose",
            "DepthwiseConv1D",
            "DepthwiseConv2D",
        ),
        _KERNEL,
    ),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), ("depthwise_kernel", "pointwise_kernel", "bias?use_bias")),
    "EinsumDense": ("kernel", "bias?bias_axes"),
    "Embedding": ("embeddings",),
    "PReLU": ("alpha",),
    "BatchNormalization": (*_NORM, "moving_mean", "moving_variance"),
    "LayerNormalization": _NORM,
    "GroupNormalization": _NORM,
    "RMSNormalization": ("scale",),
}
#: Class → parts in the order of creation: attribute, own name and variables of each.
_ATTENTION = (("query", "query"), ("key", "key"), ("value", "value"), ("output", "attention_output"))
PARTS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "LSTM": (("cell", "lstm_cell", _RECURRENT),),
    "GRU": (("cell", "gru_cell", _RECURRENT),),
    "SimpleRNN": (("cell", "simple_rnn_cell", _RECURRENT),),
    "MultiHeadAttention": tuple((f"{part}_dense", name, _KERNEL) for part, name in _ATTENTION),
    "GroupedQueryAttention": tuple((f"_{part}_dense", name, _KERNEL) for part, name in _ATTENTION),
}
BUFFERS = ("moving_mean", "moving_variance")
#: Optimizer → the role of each variable that it keeps per model variable, if it keeps no others.
_SLOTS = {"Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq")}
_LEGACY_SLOTS = {"momentum": "exp_avg", "velocity": "exp_avg_sq", "m": "exp_avg", "v": "exp_avg_sq"}
_STEP = ("iteration", "iterations", "iter")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its path, own name, its variables' names (``None``: not known), and whether they are trained."""

    path: str
    name: str
    variables: tuple[str, ...] | None
    trained: bool


def model_layers(config: Any) -> list[Layer]:
    """Return the layers of a model that ``config.json`` describes, in the model's order; empty for another class."""
    inner = config.get("config") if isinstance(config, dict) else None
    if not isinstance(inner, dict) or config.get("class_name") not in ("Sequential", "Functional", "Model"):
        return []
    return list(_contained(inner, "", inner.get("trainable") is not False, DEPTH))


def _contained(model: Mapping[str, Any], path: str, trained: bool, depth: int) -> Iterator[Layer]:
    """Yield the layers of a model, then their layers."""
    used: dict[str, int] = {}
    stored = model.get("layers")
    for one in stored if isinstance(stored, list) and depth else ():
        if not isinstance(one, dict) or ".ops" in str(one.get("module")):
            continue  # an operation, not a layer
        name = _snake(str(one.get("class_name")))
        used[name] = used.get(name, -1) + 1
        unique = f"{name}_{used[name]}" if used[name] else name
        yield from _layer(one, f"{path}layers/{unique}", trained, depth - 1)


def _layer(one: Mapping[str, Any], path: str, trained: bool, depth: int) -> Iterator[Layer]:
    kind, config = str(one.get("class_name")), one.get("config")
    own = config.get("name") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(own, str) or not depth:
        return
    trained &= config.get("trainable") is not False
    keras = str(one.get("module")).partition(".")[0] == "keras" and not config.get("quantization_config")
    if kind in ("Sequential", "Functional", "Model"):
        yield Layer(path, own, (), trained)
        yield from _contained(config, f"{path}/", trained, depth)
    elif keras and kind in ("Bidirectional", "TimeDistributed") and isinstance(config.get("layer"), dict):
        yield Layer(path, own, (), trained)
        parts = (
            {"layer": ""} if kind == "TimeDistributed" else {"forward_layer": "forward_", "backward_layer": "backward_"}
        )
        for part, prefix in parts.items():
            inner = dict(config["layer"])
            if isinstance(inner.get("config"), dict):
                inner["config"] = {**inner["config"], "name": f"{prefix}{inner['config'].get('name')}"}
            yield from _layer(inner, f"{path}/{part}", trained, depth - 1)
    elif keras and kind in PARTS:
        yield Layer(path, own, (), trained)
        for part, name, variables in PARTS[kind]:
            yield Layer(f"{path}/{part}", name, _present(variables, config), trained)
    else:
        yield Layer(path, own, _present(VARIABLES[kind], config) if keras and kind in VARIABLES else None, trained)


def _present(variables: tuple[str, ...], config: Mapping[str, Any]) -> tuple[str, ...]:
    parted = (one.partition("?") for one in variables)
    off = "beta" if config.get("rms_scaling") else ""
    return tuple(name for name, _, needs in parted if (not needs or config.get(needs)) and name != off)


def _snake(name: str) -> str:
    """Convert a class name to a path as Keras does."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def meaning(
    shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str], config: Any
) -> tuple[dict[str, tuple[str | None, str]], str]:
    """Return the parameter and the role of each variable of a ``.keras`` or ``.weights.h5`` file.

    Args:
        shapes: shapes of the variables by path.
        names: own names stored in the file, by the path of the layer.
        config: the contents of ``config.json``, or ``None``.

    Returns:
        The parameter and role by path; and a mismatch, for a note.
    """
    layers = {layer.path: layer for layer in model_layers(config)}
    wrong = [path for path, layer in layers.items() if names.get(path, layer.name) != layer.name]
    if wrong:
        layers = {}
    owners: dict[str, list[int]] = {}
    for path in shapes:
        if match := _VARS.fullmatch(path):
            owners.setdefault(match[1] or "", []).append(int(match[2]))
    found: dict[str, tuple[str | None, str]] = {}
    variables: list[tuple[str, str]] = []  # path and name of the trained ones
    complete = bool(layers)
    for owner in [*layers, *(owner for owner in owners if owner not in layers)]:
        if owner == "optimizer" or owner.startswith("optimizer/") or owner not in owners:
            continue
        layer, numbers = layers.get(owner), sorted(owners[owner])
        base = owner and f"{owner}/"
        known = layer.variables if layer is not None else None
        own = _own(owner, names, layers)
        if known is None or own is None or numbers != list(range(len(known))):
            state = owner.rpartition("/")[2].endswith("seed_generator")
            complete &= state
            for number in numbers:
                path = f"{base}vars/{number}"
                found[path] = (None, "other") if state else (path, "param")
            continue
        for number, name in enumerate(known):
            path, fqn = f"{base}vars/{number}", f"{own}.{name}"
            found[path] = fqn, "buffer" if name in BUFFERS else "param"
            if layer is not None and layer.trained and name not in BUFFERS:
                variables.append((path, fqn))
    for path in shapes:
        found.setdefault(path, (None, "other") if path.startswith("optimizer/") else (path, "param"))
    found |= _slots(shapes, variables if complete else None, config)
    if wrong:
        return found, f"config.json has other names of layers than the weights, first of {wrong[0]!r}; it is not used"
    return found, ""


def _own(owner: str, names: Mapping[str, str], layers: Mapping[str, Layer]) -> str | None:
    """Return the names that lead to a layer, joined by dots."""
    parts, own = owner.split("/"), []
    for count in range(1, len(parts) + 1):
        path = "/".join(parts[:count])
        if parts[count - 1] == "layers" and count < len(parts):
            continue
        name = names.get(path) or (layers[path].name if path in layers else None)
        if name is None:
            return None
        own.append(name)
    return ".".join(own)


def _slots(
    shapes: Mapping[str, tuple[int, ...]], variables: list[tuple[str, str]] | None, config: Any
) -> dict[str, tuple[str | None, str]]:
    """Identify the optimizer's variables, if its class, their number and their shapes determine them."""
    count = 0
    while f"optimizer/vars/{count}" in shapes:
        count += 1
    found: dict[str, tuple[str | None, str]] = {}
    nested = any(path.startswith("optimizer/") and path.count("/") > 2 for path in shapes)
    if not count or nested or shapes["optimizer/vars/0"] != ():
        return found
    kind, settings = _optimizer(config)
    if kind is None and config is not None:
        return found
    found["optimizer/vars/0"] = None, "step"
    first = 1 if isinstance(settings.get("learning_rate"), dict) else 2  # a schedule is not a variable
    more = settings.get("use_ema") or settings.get("gradient_accumulation_steps")  # they have variables of their own
    roles = () if more else _SLOTS.get(kind or "", ())
    if not roles or variables is None or settings.get("amsgrad") or count != first + len(roles) * len(variables):
        return found
    slots = {}
    for place in range(first, count):
        path, fqn = variables[(place - first) // len(roles)]
        if shapes[f"optimizer/vars/{place}"] != shapes[path]:
            return found
        slots[f"optimizer/vars/{place}"] = fqn, roles[(place - first) % len(roles)]
    return found | slots


def _optimizer(config: Any) -> tuple[str | None, Mapping[str, Any]]:
    """Return the class and settings of the optimizer that a model was compiled with."""
    compiled = config.get("compile_config") if isinstance(config, dict) else None
    one = compiled.get("optimizer") if isinstance(compiled, dict) else None
    if not isinstance(one, dict) or str(one.get("module")).partition(".")[0] != "keras":
        return None, {}
    settings = one.get("config")
    return str(one.get("class_name")), settings if isinstance(settings, dict) else {}


def legacy_meaning(
    keys: list[str], weights: Mapping[str, list[str]], model: Any, training: Any
) -> dict[str, tuple[str | None, str]]:
    """Return the parameter and the role of each variable of a whole model in HDF5.

    Args:
        keys: paths of the variables.
        weights: own paths of variables, as ``weight_names`` lists them by the path of a layer.
        model, training: the contents of the attributes ``model_config`` and ``training_config``.
    """
    inner = model.get("config") if isinstance(model, dict) and model.get("class_name") == "Sequential" else None
    root = f"{inner['name']}/" if isinstance(inner, dict) and isinstance(inner.get("name"), str) else None
    found: dict[str, tuple[str | None, str]] = {}
    slots: dict[str, tuple[str | None, str]] = {}
    for layer, listed in weights.items():
        if layer == "optimizer_weights":
            continue
        for stored in listed:
            plain = stored.removesuffix(":0")
            fqn = (plain.removeprefix(root) if root else plain).replace("/", ".")
            found[f"{layer}/{stored}"] = fqn, "buffer" if fqn.endswith(BUFFERS) else "param"
            for word, role in _LEGACY_SLOTS.items():
                for name in (f"{plain.replace('/', '_')}_{word}", f"{word}/{plain}", f"{plain}/{word}"):
                    slots[name] = (None, "other") if name in slots else (fqn, role)
    optimizer = training.get("optimizer_config") if isinstance(training, dict) else None
    adam = isinstance(optimizer, dict) and str(optimizer.get("class_name")).rpartition(">")[2] in _SLOTS
    for key in keys:
        if key.startswith("optimizer_weights/"):
            rest = key.removeprefix("optimizer_weights/").removeprefix("training/").partition("/")[2].removesuffix(":0")
            found[key] = (
                (None, "step") if rest in _STEP else slots.get(rest, (None, "other")) if adam else (None, "other")
            )
        else:
            found.setdefault(key, (key, "param"))
    return found
