"""Benchmarks that users run: `pagedserve bench serve|throughput|latency`."""

from __future__ import annotations

# name -> (module, one line of help)
BENCHES = {
    "serve": ("pagedserve.bench.serve", "load a running server and measure TTFT, TPOT, ITL, E2EL and goodput"),
    "throughput": ("pagedserve.bench.throughput", "tokens per second of offline generation"),
    "latency": ("pagedserve.bench.latency", "seconds that one offline batch takes"),
}
