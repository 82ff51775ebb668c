"""The pure parts: names, bucket plans, digests and the limits of every message."""

import random
import subprocess
import sys
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from fake_weight_sync import SPECS, Spec
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import WeightUpdateError
from weights_sync import messages as m
from weights_sync.manifest import ALIGN_BYTES, digest, find_faults, plan_buckets
from weights_sync.mapping import plain_name, resolve, stacked_names

# ---- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        ("model._orig_mod.norm.weight", "model.norm.weight"),
        ("_fsdp_wrapped_module.model._fsdp_wrapped_module.norm.weight", "model.norm.weight"),
        ("model._checkpoint_wrapped_module.norm.weight", "model.norm.weight"),
        ("model.model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("actor.module.model.norm.weight", "model.norm.weight"),
        ("norm.weight", None),
        ("model.norm.weights", None),
        ("optimizer.model.norm.weight", None),
        ("", None),
    ],
)
def test_wrappers_are_taken_off_and_nothing_else(theirs, ours):
    assert plain_name(theirs, SPECS) == ours


def test_prefix_that_belongs_to_the_model_stays():
    assert plain_name("module.weight", {"module.weight"}) == "module.weight"


def test_every_expert_is_a_part_of_the_stacked_tensors():
    shape, parts = stacked_names(SPECS)["model.layers.0.mlp.experts.gate_up_proj"]
    assert shape == (2, 64, 48)
    assert ("model.layers.0.mlp.experts.1.up_proj.weight", (1, slice(32, 64))) in parts and len(parts) == 4


def test_stacked_and_single_experts_together_are_refused():
    shapes = {name: spec.shape for name, spec in SPECS.items()} | {"model.layers.0.mlp.experts.down_proj": (2, 48, 32)}
    assert any("both hold model.layers.0.mlp.experts.0.down_proj.weight" in fault for fault in resolve(shapes, SPECS).faults)


BESIDE = {
    "language_model.model.embed_tokens.weight": Spec((300, 128)),
    "language_model.lm_head.weight": Spec((300, 128)),
    "language_model.model.layers.0.block_sparse_moe.gate.weight": Spec((1, 128)),
    "language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight": Spec((32, 128)),
    "language_model.model.layers.0.block_sparse_moe.experts.0.w2.weight": Spec((128, 32)),
    "language_model.model.layers.0.block_sparse_moe.experts.0.w3.weight": Spec((32, 128)),
}
LOADED = {
    "model.language_model.embed_tokens.weight": (300, 128),
    "lm_head.weight": (300, 128),
    "model.language_model.layers.0.mlp.gate.weight": (1, 128),
    "model.language_model.layers.0.mlp.experts.gate_up_proj": (1, 64, 128),
    "model.language_model.layers.0.mlp.experts.down_proj": (1, 128, 32),
    "model.vision_tower.final_layernorm.weight": (16,),
    "model.mm_projector.in_proj.weight": (16, 16),
}


@pytest.mark.parametrize("wrapper", ["", "module.", "module._orig_mod."])
def test_a_language_model_beside_a_vision_tower_is_found_and_the_tower_left_aside(wrapper):
    result = resolve({wrapper + name: shape for name, shape in LOADED.items()}, BESIDE)
    assert not result.faults and {pick.name for pick in result.picks} == set(BESIDE)
    gate_up = f"{wrapper}model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert {pick.name.split(".")[-2] for pick in result.picks if pick.source == gate_up} == {"w1", "w3"}


def test_a_tower_is_a_fault_for_a_model_that_has_none():
    shapes = {name: spec.shape for name, spec in SPECS.items()} | {"model.vision_tower.final_layernorm.weight": (16,)}
    assert resolve(shapes, SPECS).faults == ["model.vision_tower.final_layernorm.weight is not a tensor of this model"]


def test_untied_head_is_a_tensor_of_its_own():
    specs = SPECS | {"lm_head.weight": Spec((300, 128))}
    result = resolve({name: spec.shape for name, spec in specs.items()}, specs)
    assert not result.faults and not result.must_equal and len(result.picks) == len(specs)


# ---- plan and digest ----------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.tuples(st.lists(st.integers(1, 40), max_size=3), st.sampled_from(["float32", "bfloat16"])), max_size=20)


@given(SHAPES, st.integers(1, 64))
def test_every_byte_lies_in_exactly_one_aligned_part(shapes, blocks):
    entries = [m.TensorEntry(f"t{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)]
    buckets = plan_buckets(entries, blocks * ALIGN_BYTES)
    covered = [0] * len(entries)
    for bucket in buckets:
        end = 0
        assert 0 < bucket.num_bytes <= blocks * ALIGN_BYTES and bucket.num_bytes % ALIGN_BYTES == 0
        for part in bucket.parts:
            assert part.start >= end and part.start % ALIGN_BYTES == 0 and part.source == covered[part.tensor]
            end = part.start + part.num_bytes
            covered[part.tensor] += part.num_bytes
            assert part.num_bytes == entries[part.tensor].num_bytes or entries[part.tensor].num_bytes > blocks * ALIGN_BYTES
        assert end <= bucket.num_bytes
    assert covered == [entry.num_bytes for entry in entries]


def test_digest_is_what_the_protocol_page_says():
    import zlib

    frame = random.Random(0).randbytes(3 * 65536 + 128)
    sums = b""
    for start in (0, 65536, 131072, 196608):
        block = frame[start : start + 65536]
        total = sum(int.from_bytes(block[i : i + 8], "little") for i in range(0, len(block), 8))
        sums += (total % (1 << 64)).to_bytes(8, "little")
    assert digest(frame) == zlib.crc32(sums)
    assert digest(frame[:65536]) == zlib.crc32(sums[:8] + bytes(8))


@settings(max_examples=50)
@given(st.integers(0, 4 * 65536 - 1), st.integers(1, 255))
def test_any_changed_byte_changes_the_digest(position, flip):
    frame = np.arange(32768, dtype="<u8").view(np.uint8)
    before = digest(frame.data)
    frame[position] ^= flip
    assert digest(frame.data) != before


def test_swapped_blocks_change_the_digest():
    a, b = random.Random(1).randbytes(65536), random.Random(2).randbytes(65536)
    assert digest(a + b) != digest(b + a)


def test_faults_name_missing_unexpected_misshapen_and_repeated_tensors():
    entries = m.table_of(SPECS)
    assert find_faults(entries, SPECS) == []
    faults = find_faults(
        [entries[0], entries[0], m.TensorEntry("x", (1,), "float32"), m.TensorEntry("model.norm.weight", (1,), "float32")], SPECS
    )
    assert len(faults) == 3 + len(SPECS) - 2
    assert any("sent twice" in f for f in faults) and any("not a tensor" in f for f in faults) and any("has shape [1]" in f for f in faults)


# ---- limits -------------------------------------------------------------------------------------------------------------

BEGIN = {
    "type": "begin",
    "update": "0" * 15 + "1",
    "version": 1,
    "policy": "finish",
    "timeout_s": 5.0,
    "bucket_bytes": m.MIN_BUCKET_BYTES,
}
BUCKET = {"type": "bucket", "update": "0" * 15 + "1", "index": 0, "digest": 0}


def decode(fields):
    return m.Decoder(m.FromPublisher).decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    ("base", "field", "good", "bad"),
    [
        (BEGIN, "version", (1 << 62) - 1, 1 << 62),
        (BEGIN, "version", 0, -1),
        (BEGIN, "timeout_s", m.MAX_TIMEOUT_S, m.MAX_TIMEOUT_S + 1),
        (BEGIN, "timeout_s", 0.001, 0),
        (BEGIN, "timeout_s", 1.0, float("nan")),
        (BEGIN, "bucket_bytes", m.MAX_BUCKET_BYTES, m.MAX_BUCKET_BYTES + 64),
        (BEGIN, "bucket_bytes", m.MIN_BUCKET_BYTES, m.MIN_BUCKET_BYTES - 64),
        (BEGIN, "bucket_bytes", m.MIN_BUCKET_BYTES + 64, m.MIN_BUCKET_BYTES + 1),
        (BEGIN, "policy", "abort", "later"),
        (BEGIN, "update", "f" * 16, "f" * 17),
        (BEGIN, "type", "begin", "run"),
        (BUCKET, "index", (1 << 62) - 1, 1 << 62),
        (BUCKET, "digest", (1 << 32) - 1, 1 << 32),
        ({"type": "abort", "update": "0" * 16}, "reason", "r" * m.MAX_REASON_CHARS, "r" * (m.MAX_REASON_CHARS + 1)),
    ],
)
def test_field_is_taken_at_its_limit_and_refused_beyond(base, field, good, bad):
    decode(base | {field: good})
    with pytest.raises(WeightUpdateError, match=r"PROTOCOL\.md") as error:
        decode(base | {field: bad})
    assert error.value.code == "protocol_error"


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (["n" * m.MAX_NAME_CHARS, [2], "float32"], ["n" * (m.MAX_NAME_CHARS + 1), [2], "float32"]),
        (["n", [1] * m.MAX_DIMS, "float32"], ["n", [1] * (m.MAX_DIMS + 1), "float32"]),
        (["n", [m.MAX_ELEMENTS], "bfloat16"], ["n", [m.MAX_ELEMENTS + 1], "bfloat16"]),
        (["n", [1], "float16"], ["n", [0], "float16"]),
        (["n", [1], "float32"], ["n", [1], "int8"]),
        (["n", [1], "float32"], ["n", [1], "float32", "/etc/passwd"]),
        (["n", [1 << 21, 1 << 20], "float32"], ["n", [1 << 21, (1 << 20) + 1], "float32"]),
    ],
)
def test_table_entry_is_taken_at_its_limit_and_refused_beyond(good, bad):
    m.decode_table(msgspec.msgpack.encode([good]))
    with pytest.raises(WeightUpdateError):
        m.decode_table(msgspec.msgpack.encode([bad]))


def test_unknown_fields_garbage_and_long_headers_are_refused():
    for frame in [
        msgspec.msgpack.encode(BEGIN | {"path": "/tmp"}),
        b"",
        b"\xc1",
        b"\x80",
        bytes(100),
        b"\x91" * 60000,
        bytes(m.MAX_HEADER_BYTES + 1),
    ]:
        with pytest.raises(WeightUpdateError):
            m.Decoder(m.FromPublisher).decode(frame)


def test_table_is_taken_at_its_byte_limit_and_refused_beyond(monkeypatch):
    frame = m.encode_table(m.table_of(SPECS))
    monkeypatch.setattr(m, "MAX_TABLE_BYTES", len(frame))
    assert m.decode_table(m.encode_table(m.table_of(SPECS))) == m.table_of(SPECS)
    monkeypatch.setattr(m, "MAX_TABLE_BYTES", len(frame) - 1)
    with pytest.raises(WeightUpdateError, match="the limit is"):
        m.encode_table(m.table_of(SPECS))
    with pytest.raises(WeightUpdateError, match="the limit is"):
        m.decode_table(frame)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_a_typed_error(frame):
    for read in (m.Decoder(m.FromNode).decode, m.Decoder(m.FromPublisher).decode, m.decode_table):
        with suppress(WeightUpdateError):
            read(frame)


def test_many_reasons_are_counted_and_long_ones_cut():
    reasons = m.short(["x" * 5000] * 100)
    assert len(reasons) == m.MAX_REASONS + 1 and reasons[-1] == f"and {100 - m.MAX_REASONS} more" and len(reasons[0]) == m.MAX_REASON_CHARS


def test_service_side_never_imports_torch():
    modules = ", ".join(f"weights_sync.{name}" for name in ("coordinator", "mapping", "manifest", "channel"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_public_names_exist():
    import weights_sync

    for name in weights_sync.__all__:
        assert getattr(weights_sync, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = weights_sync.nothing
