"""The compiled products of cpu.c. In: CPU tensors. Out: CPU tensors. Never decides whether they pay: `load` says whether they exist.

Compiled on first use by the machine's own C compiler (`CC`, else cc, gcc or clang) for its own processor, and kept in the user's
cache folder; takes some seconds once. Without a compiler there are none, and plain torch does the work at about a third of the speed.

Shapes: T tokens, K experts per token, E experts, D model or head size, F expert width, N outputs, H KV heads, G query heads per KV head,
P pages of a row, S slots of a page.
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

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 120


class CpuKernels:
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

    def experts(self, x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)), float32 [T, D]; gate above up in `gate_up_EFD`."""
        (num_tokens, k), (num_experts, depth, width) = ids_TK.shape, down_EDF.shape
        x_TD, ids_TK, weights_TK = x_TD.contiguous(), ids_TK.contiguous(), weights_TK.float().contiguous()
        out_TD = torch.empty_like(x_TD)
        order_R, start_E = ids_TK.new_empty(num_tokens * k), ids_TK.new_empty(num_experts + 1)
        hidden_RF, y_RD = x_TD.new_empty(num_tokens * k, width), x_TD.new_empty(num_tokens * k, depth)
        sizes = (num_tokens, k, num_experts, depth, width)
        weights = (gate_up_EFD, down_EDF, _is_bfloat16(gate_up_EFD))
        self._call("experts", x_TD, *weights, ids_TK, weights_TK, out_TD, *sizes, order_R, start_E, hidden_RF, y_RD)
        return out_TD

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

    def route(self, logits_TE: Tensor, num_experts_per_tok: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """As `batchgen.moe.router.route`; equal logits rank by expert number."""
        ids_TK = torch.empty(logits_TE.shape[0], num_experts_per_tok, dtype=torch.int64)
        weights_TK = logits_TE.new_empty(ids_TK.shape)
        sizes = (*logits_TE.shape, num_experts_per_tok, int(normalise))
        self._call("route", logits_TE.contiguous(), *sizes, ids_TK, weights_TK, torch.empty(logits_TE.shape))
        return ids_TK, weights_TK

    def attention(
        self, q_THGD: Tensor, k_PHSD: Tensor, v_PHSD: Tensor, page_table_BP: Tensor, row_T: Tensor, positions_T: Tensor, scale: float
    ) -> Tensor:
        """Causal attention of each token over the keys of its row of the page table, up to its own position; float32 [T, H * G * D]."""
        q_THGD, page_table_BP = q_THGD.contiguous(), page_table_BP.contiguous()
        num_tokens, num_heads, group, depth = q_THGD.shape
        out_THGD = torch.empty_like(q_THGD)
        cache = (k_PHSD, v_PHSD, _is_bfloat16(k_PHSD), page_table_BP, page_table_BP.shape[1])
        sizes = (num_tokens, num_heads, group, k_PHSD.shape[2], depth)
        self._call("attention", q_THGD, *cache, row_T, positions_T, scale, out_THGD, *sizes)
        return out_THGD.view(num_tokens, -1)

    def _call(self, name: str, *arguments: Tensor | float) -> None:
        """Tensors go as addresses, integers as C's long, the rest as double; the number of threads comes last."""
        getattr(self._library, name)(*map(_c_value, arguments), ctypes.c_long(torch.get_num_threads()))


def _c_value(argument: Tensor | float) -> ctypes.c_void_p | ctypes.c_long | ctypes.c_double:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
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
    key = hashlib.sha256("\n".join((SOURCE.read_text(), " ".join(FLAGS), version, _processor())).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen"
    path = folder / f"cpu-{key}.so"
    if not path.exists():
        log.info("CPU kernels: compiling with %s, once for this machine; some seconds", compiler)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
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
