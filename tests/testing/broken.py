"""Helpers: which checks a plugin fails."""

from __future__ import annotations

from typing import Any

import pytest

from fedbench.testing.contract import Inspection, raise_if_broken


def failures(inspection: Inspection[Any]) -> dict[str, str]:
    """Map each failed check to its reason. Checks that need a failed one did not run."""
    return {f.check: f.reason for f in inspection.findings() if f.status == "failed"}


def verify_only_failure(inspection: Inspection[Any], check: str, reason: str) -> None:
    """Fail unless the plugin fails this check for this reason, and no other check."""
    found = failures(inspection)
    assert list(found) == [check], found
    assert reason in found[check]
    with pytest.raises(AssertionError, match=rf"breaks 1 check:\nfailed +{check}"):
        raise_if_broken(inspection)
