"""`verify`: a compiled function against eager, stage by stage, to the first operator that differs."""

from .report import Verification, VerificationError
from .verify import verify

__all__ = ["Verification", "VerificationError", "verify"]
