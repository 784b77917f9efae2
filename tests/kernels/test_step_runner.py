"""The kernels without Python: on an emulated Arm processor, and under the address, undefined and thread sanitizers."""

import shutil
import struct
import subprocess
from ctypes import c_float, c_int32
from pathlib import Path

import pytest
import torch

from kernels.cpu import _c_traits, binding, build
from kernels.reference import ReferenceBackend
from tests.kernels.decoders import Pages, gemma_traits, random_weights, rope

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


def write_steps(path: Path, dtype: torch.dtype, int8: bool) -> None:
    c = _c_traits(TRAITS, dtype, tied=True, int8_weights=int8)
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
        batches = [pages.step(parts) for parts in STEPS]
        put_tensor(torch.full_like(pages.pool, 0xFF))
        put(struct.pack("qq", *pages.pool.shape))
        for batch in batches:
            for name in ("tokens", "positions", "query_starts", "context_lens", "logit_rows"):
                put_tensor(getattr(batch, name))
            for table in batch.page_tables:
                put(binding.int32_array(table.shape[1:]))
                put_tensor(table)
            put(b"")
        put(b"")


def run_steps(
    folder: Path, dtype: torch.dtype, compiler: str, flags: list[str], emulator: list[str], *, int8: bool = False
) -> str:
    """Compiles and runs; checks that chunks give the bits of the whole prompt, and all the reference's values."""
    steps, logits, program = folder / f"steps-{dtype}-{int8}", folder / f"logits-{dtype}-{int8}", folder / "runner"
    write_steps(steps, dtype, int8)
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
    assert len(rows) == sum(len(ids) for parts in STEPS for _, ids, _ in parts)

    whole, first = rows[:290], rows[290:320]
    assert torch.equal(first, whole[:30])
    assert torch.equal(rows[324], whole[30])
    assert torch.equal(rows[326:], whole[31:])
    reference, pages = ReferenceBackend(), Pages(TRAITS, dtype)
    batch = pages.step(STEPS[0])
    decoder = reference.pack(TRAITS, random_weights(TRAITS), dtype, int8_weights=int8)
    theirs = reference.forward(decoder, pages.pool, batch)
    bound = 1e-5 if dtype == torch.float32 and not int8 else 0.03
    assert (whole - theirs).abs().max() <= bound * theirs.abs().max()
    return done.stdout.strip()


@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_arm_neon_gives_the_same_values(tmp_path_factory, dtype, int8):
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if not compiler or not emulator:
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user-static")
    folder = tmp_path_factory.getbasetemp() / "neon"
    folder.mkdir(exist_ok=True)
    assert run_steps(folder, dtype, compiler, ["-O2", "-static"], [emulator], int8=int8) == "neon"


@pytest.mark.parametrize(("sanitizers", "level"), [("address,undefined", "-O0"), ("thread", "-O1")])
def test_sanitizers_find_nothing(tmp_path, sanitizers, level):
    compiler = build.find_compiler()
    flags = [level, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *build.ISA_FLAGS["native"]]
    probe = subprocess.run([compiler, *flags, "-x", "c++", "-", "-o", str(tmp_path / "probe")], input=b"int main() {}")
    if probe.returncode != 0 or subprocess.run([str(tmp_path / "probe")]).returncode != 0:
        pytest.skip(f"the compiler has no {sanitizers} sanitizer that runs here")
    for dtype, int8 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        run_steps(tmp_path, dtype, compiler, flags, [], int8=int8)
