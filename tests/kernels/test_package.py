"""The package stays light, so that neither the web process nor transformers trips over it."""

import subprocess
import sys

from transformers.utils import is_kernels_available


def test_transformers_does_not_take_us_for_the_package_of_that_name():
    assert not is_kernels_available()


def test_importing_the_package_loads_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, kernels; sys.exit('torch' in sys.modules)"], check=True)
