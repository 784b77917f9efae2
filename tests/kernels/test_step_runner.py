"""The kernels without Python: on an emulated Arm processor, and under the address, undefined and thread sanitizers."""

import shutil
import struct
import subprocess
from ctypes import c_float, c_int32
from pathlib import Path

import pytest
import torch

from kernels.cpu import CpuBackend, _c_traits, binding, build
from kernels.reference import ReferenceBackend
from kernels.spec import ADAPTABLE
from tests.kernels.decoders import Pages, gemma_traits, random_adapter, random_weights, rope, with_adapters

SOURCE = Path(__file__).parent / "step_runner.cpp"
TRAITS = gemma_traits(
    hidden_size=45, layer_windows=(17, None), vocab_size=77, layer_ropes=(rope(64), rope(48)), attention_softcap=5.0
)
PROMPT = [i * i % TRAITS.vocab_size for i in range(290)]
# (sequence, tokens, first position): whole at once; in chunks and decoded, beside neighbours; over a tile of attention
STEPS = (
    [(0, PROMPT, 0)],
    [(1, PROMPT[:30], 0), (2, [5, 6, 7], 0)],
    [(2, [9], 3), (1, PROMPT[30:31], 30), (3, [1], 0)],
    [(1, PROMPT[31:286], 31)],
    *([(1, PROMPT[i : i + 1], i)] for i in range(286, 290)),
)
# And with adapters: of those of ADAPTED_BY, or none
ADAPTED_STEPS = (
    [(4, PROMPT[:40], 0)],
    [(5, PROMPT[:18], 0), (6, [5, 6, 7], 0)],
    [(6, [9], 3), (5, PROMPT[18:19], 18), (7, [1], 0)],
    [(5, PROMPT[19:39], 19)],
    [(5, PROMPT[39:40], 39)],
)
ADAPTED_BY = {4: 0, 5: 0, 6: -1, 7: 1}
ADAPTERS = (random_adapter(TRAITS, 3), random_adapter(TRAITS, 40, 1, targets=("k", "gate", "down")))


def write_steps(path: Path, dtype: torch.dtype, precision: str | None) -> None:
    c = _c_traits(TRAITS, dtype, tied=True, precision=precision)
    pages, layers = Pages(TRAITS, dtype), TRAITS.num_layers

    with path.open("wb") as file:

        def put(values) -> None:
            content = bytes(values)
            file.write(struct.pack("q", len(content)) + content)

        def put_tensor(tensor: torch.Tensor) -> None:
            put(tensor.contiguous().view(torch.uint8).numpy().tobytes())

        put(binding.int32_array([getattr(c, name) for name, kind in c._fields_ if kind is c_int32]))
        put(binding.float_array([getattr(c, name) for name, kind in c._fields_ if kind is c_float]))
        for name, count in dict(
            window=layers, group=layers, group_layer=layers, rope=layers, rope_pairs=c.ropes
        ).items():
            put(binding.int32_array(getattr(c, name)[:count]))
        put(binding.float_array(c.inv_freq[: c.ropes * TRAITS.head_dim // 2]))
        put(binding.float_array(c.rope_factor[: c.ropes]))
        for name, weight in random_weights(TRAITS).items():
            layer, slot = (int(name.split(".")[1]), name.split(".")[2]) if "." in name else (0, name)
            if slot != "embedding":
                put(binding.int32_array([layer, binding.SLOTS.index(slot)]))
                put_tensor(weight.to(dtype))
        put(b"")
        for parts in ADAPTERS:
            names = [f"layers.{i}.{target}" for i in range(layers) for target in ADAPTABLE]
            put(binding.int32_array([len(parts[name].a) if name in parts else 0 for name in names]))
            put(binding.float_array([parts[name].scale if name in parts else 0 for name in names]))
            for name, part in parts.items():
                put(binding.int32_array([int(name.split(".")[1]), ADAPTABLE.index(name.split(".")[2])]))
                put_tensor(part.a.to(dtype))
                put_tensor(part.b.to(dtype))
            put(b"")
        put(b"")
        batches = [(pages.step(parts), []) for parts in STEPS]
        batches += [(pages.step(parts), [ADAPTED_BY[s] for s, _, _ in parts]) for parts in ADAPTED_STEPS]
        put_tensor(torch.full_like(pages.pool, 0xFF))
        put(struct.pack("qq", *pages.pool.shape))
        for batch, adapters in batches:
            for name in ("tokens", "positions", "query_starts", "context_lens", "logit_rows"):
                put_tensor(getattr(batch, name))
            for table in batch.page_tables:
                put(binding.int32_array(table.shape[1:]))
                put_tensor(table)
            put(b"")
            put(binding.int32_array(adapters))
        put(b"")


def run_steps(
    folder: Path,
    dtype: torch.dtype,
    compiler: str,
    flags: list[str],
    emulator: list[str],
    *,
    precision: str | None = None,
) -> str:
    """Compiles and runs; checks that chunks give the bits of the whole prompt, and all the reference's values, without
    adapters and with some."""
    steps, logits, program = (
        folder / f"steps-{dtype}-{precision}",
        folder / f"logits-{dtype}-{precision}",
        folder / "runner",
    )
    write_steps(steps, dtype, precision)
    if not program.exists():
        command = [
            compiler,
            "-std=c++17",
            "-ffp-contract=off",
            "-pthread",
            "-w",
            *flags,
            str(SOURCE),
            "-o",
            str(program),
        ]
        subprocess.run(command, check=True)
    done = subprocess.run([*emulator, str(program), "2", str(steps), str(logits)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = torch.frombuffer(bytearray(logits.read_bytes()), dtype=torch.float32).view(-1, TRAITS.vocab_size)
    rows, adapted = rows.split([sum(len(ids) for parts in s for _, ids, _ in parts) for s in (STEPS, ADAPTED_STEPS)])

    whole, first = rows[:290], rows[290:320]
    assert torch.equal(first, whole[:30])
    assert torch.equal(rows[324], whole[30])
    assert torch.equal(rows[326:], whole[31:])
    adapted_whole = adapted[:40]
    assert torch.equal(torch.cat((adapted[40:58], adapted[62:63], adapted[64:])), adapted_whole)
    reference, pages = ReferenceBackend(), Pages(TRAITS, dtype)
    decoder = reference.pack(TRAITS, random_weights(TRAITS), dtype, precision=precision)
    adapter = reference.pack_adapter(decoder, ADAPTERS[0])
    bound = 1e-5 if dtype == torch.float32 and not precision else 0.03
    for ours, batch in (
        (whole, pages.step(STEPS[0])),
        (adapted_whole, with_adapters(pages.step(ADAPTED_STEPS[0]), [adapter], [0])),
    ):
        theirs = reference.forward(decoder, pages.pool, batch)
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]
)
def test_arm_neon_gives_the_same_values(tmp_path_factory, dtype, precision):
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if not compiler or not emulator:
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user-static")
    folder = tmp_path_factory.getbasetemp() / "neon"
    folder.mkdir(exist_ok=True)
    assert run_steps(folder, dtype, compiler, ["-O1", "-static"], [emulator], precision=precision) == "neon"


@pytest.mark.timeout(900)  # it compiles and runs five programs, of which some are forty times as slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(tmp_path, sanitizers):
    compiler = build.find_compiler()
    flags = ["-O0", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *build.ISA_FLAGS["native"]]
    probe = subprocess.run([compiler, *flags, "-x", "c++", "-", "-o", str(tmp_path / "probe")], input=b"int main() {}")
    if probe.returncode != 0 or subprocess.run([str(tmp_path / "probe")]).returncode != 0:
        pytest.skip(f"the compiler has no {sanitizers} sanitizer that runs here")
    compact = ["compact"] * CpuBackend(1).keeps_compact
    kinds = [(torch.float32, None), *((torch.bfloat16, precision) for precision in (None, "int8", *compact))]
    for dtype, precision in kinds:
        run_steps(tmp_path, dtype, compiler, flags, [], precision=precision)
