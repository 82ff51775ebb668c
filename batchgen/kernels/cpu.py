"""The compiled kernels of cpu*.c. In: CPU tensors. Out: CPU tensors. Never decides whether they pay:
`load` says whether they exist.

Compiled on first use by the machine's own C compiler (`CC`, else cc, gcc or clang) for its own processor, and kept in the user's
cache folder; takes some seconds once. Without a compiler there are none, and plain torch does the work at about a third of the speed.

Shapes: T tokens, K experts per token, E experts, D model or head size, V value size, F expert width, N outputs, H KV heads, G query heads
per KV head, P pages of a row, S slots of a page, C channels or chosen keys, W taps, B sequences.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from batchgen.kernels.cpu_quant import PackedProducts, describe
from batchgen.moe.activation import Activation
from batchgen.moe.routing import Routing
from batchgen.packing import Spans

log = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(f"cpu{part}") for part in (".h", ".c", "_attention.c", "_choice.c", "_delta.c", "_quant.c")]
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 120
SCORINGS = ("softmax", "sigmoid", "chosen")
"""As cpu.c numbers them."""


class CpuKernels(PackedProducts):
    """What a decoder computes, on float32 activations and float32 or bfloat16 weights and KV, accumulated in float32.

    Each output has the same bits whatever else is in the batch and however many threads there are. Threads are torch's.
    """

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """x @ weight.T, float32 [T, N]."""
        x_TD = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
        (num_tokens, depth), num_outputs = x_TD.shape, weight_ND.shape[0]
        y_TN = x_TD.new_empty(num_tokens, num_outputs)
        sizes = (num_tokens, num_outputs, depth)
        self._call("linear", x_TD, x_TD.stride(0), weight_ND, _is_bfloat16(weight_ND), y_TN, *sizes)
        return y_TN

    def head_products(self, x_THD: Tensor, weight_HND: Tensor, transposed: bool = False) -> Tensor:
        """Each head's own product, float32 [T, H, N]; `transposed`: of a weight [H, D, N]. Values of a head's weight lie together."""
        num_tokens, num_heads, depth = x_THD.shape
        x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
        num_outputs = weight_HND.shape[2 if transposed else 1]
        y_THN = x_THD.new_empty(num_tokens, num_heads, num_outputs)
        weight = (weight_HND, weight_HND.stride(0), _is_bfloat16(weight_HND), int(transposed))
        self._call("head_products", x_THD, *x_THD.stride()[:2], *weight, y_THN, num_tokens, num_heads, num_outputs, depth)
        return y_THN

    def takes_routing(self, routing: Routing) -> bool:
        """Whether `route` computes this; all of it."""
        return True

    def experts(
        self,
        x_TD: Tensor,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Sum over each token's experts of weight * down(activation(gate(x), up(x))), float32 [T, D]; gate above up in `gate_up_EFD`.
        `biases`: of gate and up [E, F], and of down [E, D], stored as the weights are."""
        matrices = (describe(gate_up_EFD), describe(gate_up_EFD, first_row=down_EDF.shape[2]), describe(down_EDF))
        return self._experts(x_TD, matrices, down_EDF.shape, ids_TK, weights_TK, activation, biases)

    def gate(self, gate_up_T2F: Tensor, activation: Activation) -> Tensor:
        """activation(gate, up) of rows that hold all gates, then all ups; float32 [T, F]."""
        num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        out_TF = gate_up_T2F.new_empty(num_tokens, width)
        self._call("gate", gate_up_T2F.contiguous(), *self._coded(activation), out_TF, num_tokens, width)
        return out_TF

    def sigmoid_times(self, x: Tensor, y: Tensor | None, silu: bool = False) -> Tensor:
        """y * sigmoid(x), or y * silu(x); without y, the function itself. float32, of equal shapes."""
        x, out = x.contiguous(), torch.empty(x.shape)
        self._call("sigmoid_times", x, None if y is None else y.contiguous(), int(silu), out, x.numel())
        return out

    def rms_norm(self, x_THD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, float32; [T, D] or [T, H, D] with heads side by side."""
        num_tokens, depth = x_THD.shape[0], x_THD.shape[-1]
        out_THD = torch.empty(x_THD.shape, dtype=torch.float32)
        sizes = (num_tokens, out_THD[0].numel() // depth if num_tokens else 0, depth)
        self._call("rms_norm", x_THD, x_THD.stride(0), weight_D, _is_bfloat16(weight_D), eps, out_THD, *sizes)
        return out_THD

    def rotate(self, x_THD: Tensor, rotary_T2D: Tensor) -> Tensor:
        """Pairs (i, i + D/2) of each head by its token's angle, float32 [T, H, D]; heads side by side. The table is `rotary_table`'s."""
        out_THD = torch.empty(x_THD.shape, dtype=torch.float32)
        self._call("rotate", x_THD, x_THD.stride(0), rotary_T2D.contiguous(), out_THD, *x_THD.shape)
        return out_THD

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""
        x_TD = x_TD + delta_TD
        return x_TD, self.rms_norm(x_TD, weight_D, eps)

    def place_heads(
        self,
        qkv_TX: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rotary_T2D: Tensor,
        head_slots_N: Tensor,
        k_ND: Tensor,
        v_ND: Tensor,
    ) -> Tensor:
        """Split a fused projection: norm and rotate its q and k heads, write k and v to rows `head_slots_N` of a layer's KV; returns
        q [T, H, D]. `norms`: the heads' gains for q and k."""
        num_tokens, depth = len(qkv_TX), k_ND.shape[1]
        num_kv_heads = len(head_slots_N) // max(1, num_tokens)
        qkv_THD = qkv_TX.view(num_tokens, qkv_TX.shape[1] // depth, depth)
        q_THD, k_THD, v_THD = torch.split(qkv_THD, [qkv_THD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q_THD, k_THD = self.rms_norm(q_THD, norms[0], eps), self.rms_norm(k_THD, norms[1], eps)
        for rows_ND, new_THD in ((k_ND, self.rotate(k_THD, rotary_T2D)), (v_ND, v_THD)):
            rows_ND.index_copy_(0, head_slots_N, new_THD.reshape(-1, depth).to(rows_ND.dtype))
        return self.rotate(q_THD, rotary_T2D)

    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `batchgen.moe.router.route`; equal scores rank by expert number."""
        num_tokens, num_experts = logits_TE.shape
        ids_TK = torch.empty(num_tokens, routing.num_experts_per_tok, dtype=torch.int64)
        weights_TK = logits_TE.new_empty(ids_TK.shape)
        groups = (routing.num_groups, routing.num_kept_groups, routing.group_top)
        choice = (SCORINGS.index(routing.scoring), *groups, int(routing.normalise), float(routing.scale))
        sizes = (num_tokens, num_experts, routing.num_experts_per_tok)
        self._call("route", logits_TE.contiguous(), bias_E, *choice, *sizes, ids_TK, weights_TK, torch.empty(num_tokens, 2, num_experts))
        return ids_TK, weights_TK

    def attention(
        self,
        q_THGD: Tensor,
        k_PHSD: Tensor,
        v_PHSV: Tensor,
        page_table_BP: Tensor,
        row_T: Tensor,
        positions_T: Tensor,
        scale: float,
        *,
        window: int = 0,
        sinks_N: Tensor | None = None,
        chosen_TC: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of each token over the keys of its row of the page table, up to its own position; float32 [T, H * G * V].

        `v_PHSV` may be columns of wider rows. `window`: of so many last keys alone (0: all). `sinks_N`: float32, a score per query head
        that takes part in the softmax without a value. `chosen_TC`: int64 positions that a token sees, ascending, then -1.
        """
        q_THGD, page_table_BP = q_THGD.contiguous(), page_table_BP.contiguous()
        num_tokens, num_heads, group, depth = q_THGD.shape
        out_THGV = q_THGD.new_empty(num_tokens, num_heads, group, v_PHSV.shape[-1])
        cache = (k_PHSD, v_PHSV, v_PHSV.stride(2), _is_bfloat16(k_PHSD), page_table_BP, page_table_BP.shape[1])
        chosen = (chosen_TC, 0 if chosen_TC is None else chosen_TC.shape[1])
        sizes = (num_tokens, num_heads, group, k_PHSD.shape[2], depth, v_PHSV.shape[-1])
        self._call("attention", q_THGD, *cache, row_T, positions_T, float(scale), window, sinks_N, *chosen, out_THGV, *sizes)
        return out_THGV.view(num_tokens, -1)

    def choose_keys(
        self,
        q_THD: Tensor,
        weights_TH: Tensor,
        k_PHSD: Tensor,
        page_table_BP: Tensor,
        row_T: Tensor,
        positions_T: Tensor,
        top_k: int,
    ) -> Tensor:
        """As `batchgen.attention.choice.choose_keys`, of a store with one head."""
        num_tokens, num_heads, depth = q_THD.shape
        longest = int(positions_T.max()) + 1
        chosen_TC = positions_T.new_empty(num_tokens, min(top_k, longest))
        cache = (k_PHSD, _is_bfloat16(k_PHSD), page_table_BP.contiguous(), page_table_BP.shape[1], row_T, positions_T)
        sizes = (num_tokens, num_heads, k_PHSD.shape[2], depth, longest, chosen_TC.shape[1])
        self._call("choose_keys", q_THD.contiguous(), weights_TH.contiguous(), *cache, chosen_TC, *sizes)
        return chosen_TC

    def convolve(self, x_TC: Tensor, taps_CW: Tensor, states: Tensor, spans: Spans) -> Tensor:
        """silu of a causal convolution per channel, float32 [T, C]. `states` [., C, W - 1]: last inputs, oldest first; updated."""
        out_TC = torch.empty(x_TC.shape)
        sizes = (len(spans.state_B), x_TC.shape[1], taps_CW.shape[1])
        self._call("convolve", x_TC.contiguous(), taps_CW, states, *_placed(spans), out_TC, *sizes)
        return out_TC

    def log_decay(self, x_THK: Tensor, rate_H: Tensor, bias_HK: Tensor, bound: float | None) -> Tensor:
        """-exp(rate) * softplus(x + bias), or bound * sigmoid(exp(rate) * (x + bias)); float32."""
        out_THK = torch.empty(x_THK.shape)
        self._call("log_decay", x_THK.contiguous(), rate_H, bias_HK, float(bound or 0.0), out_THK, *x_THK.shape)
        return out_THK

    def delta_rule(
        self, q_THD: Tensor, k_THD: Tensor, v_TNV: Tensor, log_decay: Tensor, beta_TN: Tensor, states: Tensor, spans: Spans
    ) -> Tensor:
        """The gated delta rule token by token, float32 [T, N, V]; see `batchgen.attention.delta`. N value heads, a multiple of H."""
        num_heads, depth = q_THD.shape[1:]
        out_TNV = torch.empty(v_TNV.shape)
        inputs = (q_THD.contiguous(), k_THD.contiguous(), v_TNV.contiguous(), log_decay.contiguous(), int(log_decay.dim() == 3))
        sizes = (len(spans.state_B), num_heads, v_TNV.shape[1] // num_heads, depth, v_TNV.shape[2])
        self._call("delta_rule", *inputs, beta_TN.contiguous(), states, *_placed(spans), out_TNV, *sizes)
        return out_TNV

    def _call(self, name: str, *arguments: Tensor | float | None) -> None:
        """Tensors go as addresses, integers as C's long, the rest as double; the number of threads comes last."""
        getattr(self._library, name)(*map(_c_value, arguments), ctypes.c_long(torch.get_num_threads()))


def _placed(spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    return spans.start_B, spans.state_B, spans.fresh_B


def _c_value(argument: Tensor | float | None) -> ctypes.c_void_p | ctypes.c_long | ctypes.c_double:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_long(argument) if isinstance(argument, int) else ctypes.c_double(argument)


def _is_bfloat16(weight: Tensor) -> int:
    return int(weight.dtype == torch.bfloat16)


@functools.cache
def load() -> CpuKernels | None:
    """The kernels, compiled now if they are not in the cache; None, with the reason in the log, where they cannot be."""
    compiler = next((found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)
    if compiler is None:
        log.info("CPU kernels: no C compiler found; products in plain torch")
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("CPU kernels: %s did not work (%s); products in plain torch", compiler, str(reason).strip()[-300:])
        return None
    log.info("CPU kernels: compiled for this processor")
    return CpuKernels(library)


def _compiled(compiler: str) -> Path:
    """Path of the shared library for this source, compiler and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S).stdout  # noqa: S603
    parts = (*(source.read_text() for source in SOURCES), " ".join(FLAGS), version, _processor())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen"
    path = folder / f"cpu-{key}.so"
    if not path.exists():
        log.info("CPU kernels: compiling with %s, once for this machine; some seconds", compiler)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [compiler, *FLAGS, "-o", str(made), *map(str, SOURCES[1:])]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)  # noqa: S603
            made.replace(path)
    return path


def _processor() -> str:
    """What `-march=native` depends on: home folders are shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()
