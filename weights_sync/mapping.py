"""From a trainer's parameter names to the engine's. In: names and shapes of both sides. Out: picks, or faults in words. Pure; no torch.

Four things differ: wrappers put prefixes before or into names, transformers 5 stacks the experts of a layer in one tensor and calls their
block `mlp`, a tied head has a second name, and a language model beside a vision tower is named the other way round. Nothing is guessed:
a prefix goes only when the name is unknown with it and known without it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

INNER_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")
"""Put anywhere in a name by torch.compile, FSDP, activation checkpointing and DeepSpeed."""
OUTER_WRAPPERS = ("module.", "base_model.model.", "model.", "policy.", "actor.")
"""Put before a name by DDP, PEFT and trainers' own modules."""
TIED = {
    "lm_head.weight": "model.embed_tokens.weight",
    "language_model.lm_head.weight": "language_model.model.embed_tokens.weight",
}
"""Second names of tied heads."""
BESIDE_TOWERS = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("language_model.model.blocks.", "language_model.model.layers."),
)
"""How transformers 5 begins the names of such a language model (the last: in files that it writes), and how its checkpoints do."""
TOWERS = ("vision_tower.", "mm_projector.", "visual.")
"""Beside a language model; the engine has no use for them."""
BLOCKS = (".mlp.", ".block_sparse_moe.")
"""What transformers 5 calls a layer's experts, router and shared experts, and what checkpoints of some families do."""
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
_HYPER = re.compile(r"\.(attn|ffn)_hc\.(fn|base|scale)$")
"""Hyper-connections of GLM-5.3-Flash."""
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class Pick:
    """Engine tensor `name` is the trainer's tensor `source`, or its part `source[index]`."""

    name: str
    source: str
    index: Index = ()


@dataclass(slots=True)
class Resolution:
    """Where each engine tensor comes from."""

    picks: list[Pick] = field(default_factory=list)
    must_equal: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of the trainer's tensors that are one in the engine (a tied head): only the second is sent."""
    faults: list[str] = field(default_factory=list)


def stacked_names(specs: Mapping[str, Any]) -> dict[str, tuple[Shape, list[tuple[str, Index]]]]:
    """Names under which transformers 5 holds all experts of a layer, or the three convolutions of Kimi-Linear's:
    {name: (shape, [(engine name, index)])}.

    gate_up_proj is [E, 2F, D], down_proj is [E, D, F] (E experts, D model, F ffn; the halves of gate_up_proj are gate and up).
    """
    layers: dict[str, dict[tuple[int, str], str]] = {}
    for name in specs:
        if match := _EXPERT.fullmatch(name):
            part = _PARTS.get(match["part"], match["part"])
            layers.setdefault(match["experts"].replace(*BLOCKS[::-1]), {})[int(match["number"]), part] = name
    stacked: dict[str, tuple[Shape, list[tuple[str, Index]]]] = {}
    for experts, names in layers.items():
        num_experts = 1 + max(number for number, _ in names)
        if len(names) != 3 * num_experts:
            continue
        width, depth = specs[names[0, "gate_proj"]].shape
        halves = (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width)))
        stacked[f"{experts}.gate_up_proj"] = (
            (num_experts, 2 * width, depth),
            [(names[e, part], (e, half)) for e in range(num_experts) for part, half in halves],
        )
        stacked[f"{experts}.down_proj"] = (
            (num_experts, depth, width),
            [(names[e, "down_proj"], (e,)) for e in range(num_experts)],
        )
    for name in specs:
        if not name.endswith(".q_conv1d.weight"):
            continue
        parts = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        rows, *rest = specs[name].shape
        if all(part in specs and specs[part].shape == specs[name].shape for part in parts):
            slices: list[tuple[str, Index]] = [(part, (slice(i * rows, (i + 1) * rows),)) for i, part in enumerate(parts)]
            stacked[name.replace("q_conv1d", "conv1d")] = ((3 * rows, *rest), slices)
    return stacked


def resolve(shapes: Mapping[str, Shape], specs: Mapping[str, Any]) -> Resolution:
    """Match a trainer's tensors with the engine's `specs` (anything with `.shape` by name). Faults name every tensor concerned."""
    result, stacked = Resolution(), stacked_names(specs)
    aliases = {alias: name for alias, name in TIED.items() if name in specs and alias not in specs}
    known = specs.keys() | stacked.keys() | aliases.keys()
    has_towers = any(name.startswith(("language_model.", "model.language_model.")) for name in known)
    sources: dict[str, str] = {}
    for source in shapes:
        name = plain_name(source, known)
        if name is None and has_towers and _unwrapped(source).startswith(TOWERS):
            continue
        if name is None:
            result.faults.append(f"{source} is not a tensor of this model")
        elif name in sources:
            result.faults.append(f"{sources[name]} and {source} are the same tensor of this model, {name}")
        else:
            sources[name] = source
    for alias, name in aliases.items():
        if alias in sources:
            source = sources.pop(alias)
            if name in sources:
                result.must_equal.append((source, sources[name]))
            else:
                sources[name] = source
    taken: dict[str, str] = {}
    for name, source in sources.items():
        shape, parts = stacked.get(name) or (tuple(specs[name].shape), [(name, ())])
        if tuple(shapes[source]) != shape:
            result.faults.append(f"{source} has shape {list(shapes[source])}, the engine's {name} is {list(shape)}")
        for part, index in parts:
            if part in taken:
                result.faults.append(f"{source} and {taken[part]} both hold {part}")
            taken[part] = source
            result.picks.append(Pick(part, source, index))
    missing = [name for name in specs if name not in taken]
    buffers = " (named_parameters() leaves out buffers; push state_dict() instead)"
    result.faults += [f"{name} is missing; the engine reads it{'' if number else buffers}" for number, name in enumerate(missing)]
    return result


def plain_name(source: str, known: Any) -> str | None:
    """The engine's name for a trainer's name, or None."""
    name = source
    for wrapper in INNER_WRAPPERS:
        if name not in known:
            name = name.replace(wrapper, "")
    while name not in known:
        swapped = [ours + name.removeprefix(theirs) for theirs, ours in BESIDE_TOWERS if name.startswith(theirs)]
        swapped += [_HYPER.sub(r".hc_\1_\2", each.replace(*BLOCKS).replace(".forget_gate.", ".")) for each in (name, *swapped)]
        swapped.append(name.replace(*BLOCKS[::-1]))  # transformers writes a dense layer of Kimi-Linear like one with experts
        if found := next((each for each in swapped if each in known), None):
            return found
        wrapper = next((w for w in OUTER_WRAPPERS if name.startswith(w)), "")
        if not wrapper:
            return None
        name = name.removeprefix(wrapper)
    return name


def _unwrapped(source: str) -> str:
    """The name without any wrapper that is known."""
    for wrapper in INNER_WRAPPERS:
        source = source.replace(wrapper, "")
    while wrapper := next((w for w in OUTER_WRAPPERS if source.startswith(w)), ""):
        source = source.removeprefix(wrapper)
    return source
