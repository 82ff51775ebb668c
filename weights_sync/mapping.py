"""From a trainer's parameter names to the engine's. In: names and shapes of both sides. Out: picks, or faults in words. Pure; no torch.

Three things differ: wrappers put prefixes before or into names, transformers 5 stacks the experts of a layer in one tensor, and a tied
head has a second name. Nothing is guessed: a prefix goes only when the name is unknown with it and known without it.
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
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Second names of tied heads."""
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")


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
    """Names under which transformers 5 holds all experts of a layer: {name: (shape, [(engine name, index)])}.

    gate_up_proj is [E, 2F, D], down_proj is [E, D, F] (E experts, D model, F ffn; the halves of gate_up_proj are gate and up).
    """
    layers: dict[str, dict[tuple[int, str], str]] = {}
    for name in specs:
        if match := _EXPERT.fullmatch(name):
            layers.setdefault(match["experts"], {})[int(match["number"]), match["part"]] = name
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
    return stacked


def resolve(shapes: Mapping[str, Shape], specs: Mapping[str, Any]) -> Resolution:
    """Match a trainer's tensors with the engine's `specs` (anything with `.shape` by name). Faults name every tensor concerned."""
    result, stacked = Resolution(), stacked_names(specs)
    aliases = {alias: name for alias, name in TIED.items() if name in specs and alias not in specs}
    known = specs.keys() | stacked.keys() | aliases.keys()
    sources: dict[str, str] = {}
    for source in shapes:
        name = plain_name(source, known)
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
    buffers = " (named_parameters() leaves out buffers; push state_dict() instead)" if missing else ""
    result.faults += [f"{name} is missing; the engine reads it{buffers}" for name in missing]
    return result


def plain_name(source: str, known: Any) -> str | None:
    """The engine's name for a trainer's name, or None."""
    name = source
    for wrapper in INNER_WRAPPERS:
        if name not in known:
            name = name.replace(wrapper, "")
    while name not in known:
        wrapper = next((w for w in OUTER_WRAPPERS if name.startswith(w)), "")
        if not wrapper:
            return None
        name = name.removeprefix(wrapper)
    return name
