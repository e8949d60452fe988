"""Helper: which checks a plugin fails."""

from __future__ import annotations

from fedbench.testing.contract import Inspection


def failures(inspection: Inspection) -> dict[str, str]:
    """Map each failed check to its reason. Checks that need a failed one did not run."""
    return {f.check: f.reason for f in inspection.findings() if f.status == "failed"}
