"""What every benchmark says of the machine: numbers taken while others run mean little."""

from __future__ import annotations

import time


def idle_share(seconds: float = 0.5) -> float:
    """Idle CPU time over all CPU time, from /proc/stat (NaN where there is none)."""

    def read() -> tuple[int, int]:
        with open("/proc/stat") as file:
            numbers = [int(x) for x in file.readline().split()[1:9]]
        return numbers[3] + numbers[4], sum(numbers)

    try:
        idle, total = read()
        time.sleep(seconds)
        later_idle, later_total = read()
    except OSError:
        return float("nan")
    return (later_idle - idle) / max(1, later_total - total)
