"""Every Triton kernel becomes machine code for real chips, without one, and fits them."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
MODELS = ("SmolLM2-135M", "Gemma-3-270m")


@pytest.mark.timeout(900)  # a minute on an idle machine
def test_every_kernel_compiles_and_fits_each_chip(tmp_path):
    asked = [part for model in MODELS for part in ("--model", model)]
    command = [sys.executable, "-m", "kernels.triton.compile_ahead", "--json", *asked]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert {each["chip"] for each in found} == {"sm_80", "sm_90", "sm_100"}
    assert {each["kernel"].split(",")[0] for each in found} == {
        "paged_attention", "merge_spans", "add_rms_norm", "rotate_and_write_kv", "write_kv", "gated_activation",
        "copy_pages",
    }  # fmt: skip
    assert [each for each in found if not each["fits"]] == []
