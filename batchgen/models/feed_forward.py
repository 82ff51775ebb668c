"""Feed-forward layers, dense and with experts. In: normed activations. Out: what is to be added to the residual stream.

Shapes: T tokens, D model, F width, E experts, K experts per token.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.models.config import FeedForwardSpec
from batchgen.models.reader import ConfigReader
from batchgen.models.scope import Linear, RmsNorm, Scope
from batchgen.moe.activation import SILU, Activation
from batchgen.moe.expert_sum import ExpertSum
from batchgen.moe.experts import Experts
from batchgen.moe.router import route
from batchgen.moe.routing import Routing
from batchgen.quant.format import Format
from batchgen.quant.mxfp4 import Mxfp4


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """Gate and up projections, activation, down projection (Shazeer 2020)."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = SILU
    saved_as: str = "mlp"
    """What transformers calls the layer when it saves it, if that is not what it was loaded as."""

    num_experts: ClassVar[int] = 0
    num_experts_per_tok: ClassVar[int] = 0

    def build(self, scope: Scope) -> "DenseLayer":
        """The layer under `mlp`."""
        layer = DenseLayer(scope / "mlp", self.intermediate_size, self.activation, self.bias)
        _rename_dense(scope, "mlp", self.saved_as)
        return layer


class DenseLayer:
    """The layer, or an expert that all tokens share."""

    def __init__(self, scope: Scope, width: int, activation: Activation, bias: bool = False):
        self.arithmetic, self.activation = scope.arithmetic, activation
        self.gate_up = Linear(scope, scope.hidden_size, {"gate_proj": width, "up_proj": width}, bias)
        self.down = Linear(scope, width, {"down_proj": scope.hidden_size}, bias)

    def hidden(self, x_TD: Tensor) -> Tensor:
        """[T, D]."""
        return self.down(self.arithmetic.gate(self.gate_up(x_TD), self.activation))

    def __call__(self, x_TD: Tensor) -> tuple[None, Tensor, None]:
        """As every feed-forward layer."""
        return None, self.hidden(x_TD), None


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeNames:
    """What a family calls the parts. A loaded model of transformers has `mlp.gate` and stacked `mlp.experts` in all."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    """An expert's projections."""
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """A router and its experts."""

    routing: Routing
    moe_intermediate_size: int
    """Width of an expert."""
    activation: Activation = SILU
    corrected: bool = False
    """A bias takes part in the choice of experts and not in their weights (DeepSeek-V3)."""
    biased: bool = False
    """Router and experts have biases; checkpoints stack the experts, inputs first, gates and ups side by side (GPT-OSS)."""
    wide_router: bool = False
    """The router's product is in float32 whatever the type of weights."""
    shared_width: int = 0
    """Of what every token goes through beside its experts; 0: nothing."""
    shared_gate: bool = False
    """It is weighted by a sigmoid of its own."""
    latent_size: int = 0
    """Experts work in a space of this size, which tokens are projected into and back from; 0: in the model's own (Kimi-K3)."""
    latent_norm: bool = False
    names: MoeNames = field(default_factory=MoeNames)

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        return self.routing.num_experts_per_tok

    def build(self, scope: Scope) -> "MoeLayer":
        """The layer under its block's name."""
        return MoeLayer(self, scope)


def read_moe(reader: ConfigReader, **family: Any) -> Moe:
    """What most families name alike, and `family`'s own fields, which win; `num_experts`, `scoring` and the like are the routing's."""
    routing: dict[str, Any] = {
        "num_experts_per_tok": reader.count("num_experts_per_tok", "num_experts_per_token"),
        "normalise": reader.flag("norm_topk_prob"),
    }
    names = Routing.__slots__
    routing |= {name: value for name, value in family.items() if name in names}
    if "num_experts" not in routing:
        routing["num_experts"] = reader.count("num_experts", "num_local_experts", "n_routed_experts")
    fields = {name: value for name, value in family.items() if name not in names}
    fields.setdefault("moe_intermediate_size", reader.integer("moe_intermediate_size", "intermediate_size"))
    return Moe(routing=Routing(**routing), **fields)


def sparse_layers(reader: ConfigReader, moe: Moe) -> list[FeedForwardSpec]:
    """Experts in every layer, but for those that `mlp_only_layers` and `decoder_sparse_step` make dense (Qwen)."""
    step, dense = reader.count("decoder_sparse_step", default=1), reader.integers("mlp_only_layers", default=[])
    is_sparse = [(i + 1) % step == 0 and i not in dense for i in range(reader.num_layers)]
    return [moe if sparse else Dense(intermediate_size=reader.integer("intermediate_size")) for sparse in is_sparse]


def dense_first(reader: ConfigReader, moe: Moe, **dense: Any) -> list[FeedForwardSpec]:
    """Experts in every layer but the first ones: `mlp_layer_types`, or `first_k_dense_replace` of them (DeepSeek), with these fields."""
    reader.refuse("moe_layer_freq", (1,))
    types = reader.per_layer("mlp_layer_types", ("dense", "sparse"))
    num_dense = reader.count("first_k_dense_replace", default=0, least=0)
    is_dense = [i < num_dense for i in range(reader.num_layers)] if types is None else [kind == "dense" for kind in types]
    return [Dense(intermediate_size=reader.integer("intermediate_size"), **dense) if first else moe for first in is_dense]


class MoeLayer:
    """Router, experts, and what is shared."""

    def __init__(self, spec: Moe, layer: Scope):
        self.spec, self.arithmetic = spec, layer.arithmetic
        names, scope, hidden = spec.names, layer / spec.names.block, layer.hidden_size
        self.router_ED = scope.tensor(spec.num_experts, hidden)
        self.correction_E = scope.tensor(spec.num_experts, dtype=torch.float32) if spec.corrected else None
        scope.matrices.append(self.router_ED)
        self.router_bias_E = scope.parameter(f"{names.router}.bias", spec.num_experts) if spec.biased else None
        _register_router(layer, names, self.router_ED, self.correction_E)
        size = spec.latent_size or hidden
        sizes = (spec.num_experts, size, spec.moe_intermediate_size)
        form = (_format_inputs_first if spec.biased else _format_of_experts)(scope / "experts", names, *sizes)
        self.experts = Experts(*sizes, self.arithmetic, spec.activation, spec.biased, form)
        scope.matrices.extend(self.experts.matrices)
        if self.experts.biases is None:
            _register_experts(layer, names, self.experts)
        else:
            _register_inputs_first(scope / "experts", self.experts, self.experts.biases)
        self.shared = DenseLayer(scope / names.shared, spec.shared_width, spec.activation) if spec.shared_width else None
        if self.shared is not None:
            _rename_dense(layer, f"{names.block}.{names.shared}", f"mlp.{names.shared}")
        self.shared_gate = Linear(scope, hidden, {f"{names.shared}_gate": 1}) if spec.shared_gate else None
        self.down = Linear(scope, hidden, {"routed_expert_down_proj": size}) if spec.latent_size else None
        self.norm = RmsNorm(scope, "routed_expert_norm", size) if spec.latent_norm else None
        self.up = Linear(scope, size, {"routed_expert_up_proj": hidden}) if spec.latent_size else None

    def __call__(self, x_TD: Tensor) -> tuple[Tensor | None, Tensor | ExpertSum, Tensor]:
        """The shared expert's part, the experts' part, and ids_TK."""
        logits_TE = self.arithmetic.linear(x_TD, self.router_ED, self.router_bias_E, wide=self.spec.wide_router)
        ids_TK, weights_TK = route(self.arithmetic, logits_TE, self.spec.routing, self.correction_E)
        shared_TD = None if self.shared is None else self._share(self.shared.hidden(x_TD), x_TD)
        if self.down is None or self.up is None:
            return shared_TD, self.experts(x_TD, ids_TK, weights_TK), ids_TK
        sum_TD = self.experts(self.down(x_TD), ids_TK, weights_TK)
        sum_TD = sum_TD.total() if isinstance(sum_TD, ExpertSum) else sum_TD
        return shared_TD, self.up(sum_TD if self.norm is None else self.norm(sum_TD)), ids_TK

    def _share(self, shared_TD: Tensor, x_TD: Tensor) -> Tensor:
        if self.shared_gate is None:
            return shared_TD
        logits_T1 = self.shared_gate(x_TD)
        # a softmax, which torch computes row by row: the last bits of an elementwise sigmoid depend on the place in the tensor
        return shared_TD * torch.cat((logits_T1, torch.zeros_like(logits_T1)), dim=1).softmax(1)[:, :1]


def _rename_dense(layer: Scope, name: str, common: str) -> None:
    if common != name:
        for part in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
            layer.also(f"{common}.{part}", f"{name}.{part}")


def _register_router(layer: Scope, names: MoeNames, router_ED: Tensor, correction_E: Tensor | None) -> None:
    common = "mlp.gate.weight" if names.router == "gate" else f"mlp.{names.router}.weight"
    own = [(f"{names.block}.{names.router}.weight", common, router_ED)]
    if correction_E is not None:
        own.append((f"{names.block}.{names.correction}", f"mlp.{names.correction}", correction_E))
    for name, common, view in own:
        layer.register(name, view)
        if name != common:
            layer.also(common, name)


def _format_of_experts(scope: Scope, names: MoeNames, num_experts: int, size: int, width: int) -> Format | None:
    """The first expert's, which is all experts'."""
    shapes = {names.gate: (width, size), names.up: (width, size), names.down: (size, width)}
    return _one_format(scope, {f"0.{name}.weight": shape for name, shape in shapes.items()})


def _format_inputs_first(scope: Scope, names: MoeNames, num_experts: int, size: int, width: int) -> Format | None:
    form = _one_format(scope, {"gate_up_proj": (num_experts, 2 * width, size), "down_proj": (num_experts, size, width)})
    if form is not None and not isinstance(form, Mxfp4):
        raise ModelError(f"{scope.full('gate_up_proj')}: experts with biases are read plainly and in MXFP4, got {form}")
    return form


def _one_format(scope: Scope, shapes: dict[str, tuple[int, ...]]) -> Format | None:
    forms = {scope.full(name): scope.format_of(name, *shape) for name, shape in shapes.items()}
    if len(set(forms.values())) > 1:
        raise ModelError(f"config.json: quantization_config: experts of a layer have one format, got {forms}")
    return next(iter(forms.values()))


def _register_experts(layer: Scope, names: MoeNames, experts: Experts) -> None:
    """One by one as checkpoints have them, and stacked as transformers holds them."""
    gate_up, down, scope = experts.gate_up_E2FD, experts.down_EDF, layer / names.block / "experts"
    num_experts, _, width, depth = gate_up.shape
    firsts = [scope.slot(f"{e}.{name}.weight", gate_up[e][i]) for e in range(num_experts) for i, name in enumerate((names.gate, names.up))]
    lasts = [scope.slot(f"{e}.{names.down}.weight", down[e]) for e in range(num_experts)]
    layer.register("mlp.experts.gate_up_proj", gate_up, shape=(num_experts, 2 * width, depth), covers=firsts)
    layer.register("mlp.experts.down_proj", down, covers=lasts)


def _register_inputs_first(scope: Scope, experts: Experts, biases: tuple[Tensor, Tensor]) -> None:
    """Stacked [E, D, 2F] and [E, F, D], gate and up of each output side by side."""
    num_experts, _, width, depth = experts.gate_up_E2FD.shape
    shape = (num_experts, depth, 2 * width)
    scope.register("gate_up_proj", experts.gate_up_E2FD, shape=shape, inputs_first=True, alternating=True)
    scope.register("gate_up_proj_bias", biases[0].view(num_experts, 2, width), shape=(num_experts, 2 * width), alternating=True)
    scope.register("down_proj", experts.down_EDF, shape=(num_experts, width, depth), inputs_first=True)
    scope.register("down_proj_bias", biases[1])
