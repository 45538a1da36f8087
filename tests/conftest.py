"""What holds for every test: how much of the machine it may take, and no clock for hypothesis."""

from __future__ import annotations

import os

import hypothesis

# Tensors of tests are tiny: a second thread costs more than it saves, and on a busy machine ten times more. Torch reads
# this when it is imported, here and in every process that tests start; the native kernels' tests choose their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may take long on a busy machine; what may not take long for other reasons has a timeout.
hypothesis.settings.register_profile(
    "pagedserve", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("pagedserve")
