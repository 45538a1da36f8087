"""The OpenAPI document against the live server: schemathesis makes requests from it and checks every answer by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.server import ServerProcess

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_every_answer_is_as_documented(tiny: ServerProcess, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{tiny.base_url}/openapi.json", "--checks", CHECKS]
    command += ["--phases", "fuzzing", "--max-examples", "10", "--mode", "all", "--seed", "1", "--no-color"]
    command += ["--suppress-health-check", "too_slow"]  # of making requests, on a busy machine
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Tested:" in done.stdout
