"""Which tensors are quantised, and how. In: config.json, the checkpoint's tensor names. Out: a Quantization. Never reads a tensor.

Activations stay in the compute type: where a checkpoint asks for them to be quantised on the fly, results are closer to the unquantised
model's; where it brings scales for them (static), it is refused.
"""

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from batchgen.errors import ModelError
from batchgen.quant.format import Format
from batchgen.quant.fp8 import Fp8
from batchgen.quant.int4 import Int4
from batchgen.quant.mxfp4 import GROUP, Mxfp4Blocks, Mxfp4Packed

FP8_NAMES = (None, "e4m3", "float8_e4m3fn")
INT4_GROUPS = (32, 64, 128)
BLOCKS_NAME = re.compile(r"\.experts\.(gate_up|down)_proj$")
"""What gpt-oss's MXFP4 applies to."""
MODULE_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A format and the modules that it applies to."""

    form: Format
    applies: Callable[[str], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """What a checkpoint's config.json says about quantisation."""

    where: str
    """File and field, for messages."""
    rules: tuple[Rule, ...]
    excludes: Callable[[str], bool]
    """Whether a module is left out."""
    stored: Container[str] | None
    """Names of the checkpoint's tensors, which decide what the configuration leaves open."""

    def format_of(self, name: str) -> Format | None:
        """Format of the matrix that would be called `name` if it were not quantised (`...q_proj.weight`, `...experts.gate_up_proj`); None
        if it is stored plainly. Asked of right operands of products only: configurations speak of linear layers and do not say what else
        is one. ModelError if config.json and the stored names contradict each other."""
        module = name.removesuffix(".weight")
        form = next((rule.form for rule in self.rules if rule.applies(module)), None)
        excluded = self.excludes(module)
        if self.stored is None or form is None:
            return None if excluded else form
        codes, scales = (form.names(name)[suffix] for suffix in form.suffixes[:2])
        present = scales in self.stored
        if present and excluded:
            raise ModelError(f"{self.where} leaves {module} out, but the checkpoint has {scales}; one of them is wrong")
        if not present and codes in self.stored and codes != name:
            raise ModelError(f"{self.where}: {codes} is in the checkpoint, {scales} is not; copy the folder again")
        return form if present else None


def read_quantization(config: dict[str, Any], path: str, stored: Container[str] | None = None) -> Quantization | None:
    """What `quantization_config`, of the model or of its `text_config`, says; None without one. `path`: the file, for messages. `stored`:
    names of the checkpoint's tensors; without them a matrix is quantised unless the configuration says otherwise.

    ModelError, naming file and field, for a scheme that is not read here and for fields that are missing or contradict each other.
    """
    text = config.get("text_config")
    places = {"": config.get("quantization_config"), "text_config.": text.get("quantization_config") if isinstance(text, dict) else None}
    found = [(prefix, values) for prefix, values in places.items() if values is not None]
    if not found:
        return None
    prefix, values = found[0]
    if any(other != values for _, other in found):
        raise ModelError(f"{path}: quantization_config and text_config.quantization_config differ; keep the one that is right")
    fields = _Fields(values, f"{path}: {prefix}quantization_config")
    return _METHODS[fields.only("quant_method", *_METHODS)](fields, stored)


class _Fields:
    """A json object whose errors name file and field."""

    def __init__(self, values: Any, where: str):
        self.where = where
        if not isinstance(values, dict):
            raise ModelError(f"{where} is an object, got {values!r:.100}")
        self.values = values

    def error(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self.where}.{name} {what}")

    def get(self, name: str) -> Any:
        """None if it is absent."""
        return self.values.get(name)

    def child(self, name: str) -> "_Fields":
        if self.get(name) is None:
            raise self.error(name, "is missing")
        return _Fields(self.get(name), f"{self.where}.{name}")

    def only(self, name: str, *allowed: Any) -> Any:
        """The value, which is one of these; None among them lets it be absent."""
        value = self.get(name)
        if not any(type(value) is type(each) and value == each for each in allowed):
            got = "is missing" if value is None else f"is {value!r:.100}"
            raise self.error(name, f"{got}; read: {', '.join('none' if each is None else repr(each) for each in allowed)}")
        return value

    def empty(self, name: str) -> None:
        """Refuse whatever it holds."""
        if self.get(name):
            raise self.error(name, f"is {self.get(name)!r:.100}; this is not computed")

    def words(self, *names: str) -> list[str]:
        """A list of strings under the first of these names that is present."""
        name = next((each for each in names if self.get(each) is not None), names[0])
        value = self.get(name)
        if value is not None and (not isinstance(value, list) or any(not isinstance(word, str) for word in value)):
            raise self.error(name, f"is a list of strings, got {value!r:.100}")
        return value or []

    def pattern(self, name: str, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except re.error as error:
            raise self.error(name, f"has {text!r}, which is not a regular expression ({error})") from error


def _read_fp8(fields: _Fields, stored: Container[str] | None) -> Quantization:
    fields.only("fmt", *FP8_NAMES)
    fields.only("activation_scheme", None, "dynamic")
    fields.only("expert_dtype", None, "fp8")
    fields.empty("modules_to_convert")
    scale = fields.only("scale_fmt", None, "float", "ue8m0")
    block = fields.get("weight_block_size")
    if block is None:
        raise fields.error("weight_block_size", "is missing: scales per tensor are not read, only per block")
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise fields.error("weight_block_size", f"is two positive integers, got {block!r:.100}")
    form = Fp8(block=(block[0], block[1]), powers_of_two=scale == "ue8m0")
    excludes = _excludes_transformers(fields, "modules_to_not_convert", "ignored_layers")
    return Quantization(where=fields.where, rules=(Rule(form=form, applies=lambda _: True),), excludes=excludes, stored=stored)


def _read_mxfp4(fields: _Fields, stored: Container[str] | None) -> Quantization:
    rule = Rule(form=Mxfp4Blocks(), applies=lambda module: BLOCKS_NAME.search(module) is not None)
    excludes = _excludes_transformers(fields, "modules_to_not_convert")
    return Quantization(where=fields.where, rules=(rule,), excludes=excludes, stored=stored)


def _excludes_transformers(fields: _Fields, *names: str) -> Callable[[str], bool]:
    """A word leaves out a module if it matches from the start to a module's boundary, as a regular expression, or is the module's end."""
    words = [*fields.words(*names), "lm_head"]
    patterns = [fields.pattern(names[0], rf"(?:{word}){MODULE_BOUNDARY}") for word in words]
    return lambda module: module.endswith(tuple(words)) or any(pattern.match(module) for pattern in patterns)


def _read_compressed_tensors(fields: _Fields, stored: Container[str] | None) -> Quantization:
    fields.only("quantization_status", None, "compressed")
    for name in ("kv_cache_scheme", "transform_config"):
        fields.empty(name)
    groups = fields.child("config_groups")
    sparsity = fields.get("sparsity_config")
    if sparsity:
        _Fields(sparsity, f"{fields.where}.sparsity_config").only("format", None, "dense")
    rules = [_read_group(groups.child(name), fields.get("format")) for name in groups.values]
    if not rules:
        raise fields.error("config_groups", "is empty")
    ignored = [_matcher(fields, "ignore", word) for word in fields.words("ignore")]
    return Quantization(
        where=fields.where, rules=tuple(rules), excludes=lambda module: any(match(module) for match in ignored), stored=stored
    )


def _read_group(group: _Fields, overall: Any) -> Rule:
    kind = group.get("format") or overall
    if kind not in ("pack-quantized", "mxfp4-pack-quantized"):
        raise group.error("format", f"is {kind!r}; read: 'pack-quantized', 'mxfp4-pack-quantized'")
    group.empty("output_activations")
    if group.get("input_activations"):
        group.child("input_activations").only("dynamic", True)
    weights = group.child("weights")
    weights.only("num_bits", 4)
    weights.only("symmetric", None, True)
    weights.only("strategy", None, "group")
    weights.only("dynamic", None, False)
    weights.only("actorder", None, "weight", "static", False)
    form: Format
    if kind == "mxfp4-pack-quantized":
        weights.only("type", "float")
        weights.only("group_size", GROUP)
        weights.only("scale_dtype", None, "torch.uint8")
        form = Mxfp4Packed()
    else:
        weights.only("type", None, "int")
        weights.only("scale_dtype", None, "torch.bfloat16")
        form = Int4(group=weights.only("group_size", *INT4_GROUPS))
    targets = [_matcher(group, "targets", word) for word in group.words("targets")]
    if not targets:
        raise group.error("targets", "is missing")
    return Rule(form=form, applies=lambda module: any(match(module) for match in targets))


def _matcher(fields: _Fields, name: str, word: str) -> Callable[[str], bool]:
    """`re:` and a regular expression for the start of a module's name, the whole name, or `Linear`, which all are."""
    if word.startswith("re:"):
        pattern = fields.pattern(name, word.removeprefix("re:"))
        return lambda module: pattern.match(module) is not None
    if name == "targets" and word[:1].isupper() and word != "Linear":
        raise fields.error(name, f"has the class {word!r}; read: 'Linear', names of modules, and 're:' with a regular expression")
    return lambda module: word in (module, "Linear")


_METHODS: dict[str, Callable[[_Fields, Container[str] | None], Quantization]] = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "compressed-tensors": _read_compressed_tensors,
}
