"""Shows that a layout changes no number: the program that jgt runs, compared with the plain function."""

from jgt.verification.verify import TOLERANCE, Difference, Verification, verify, verify_sharded

__all__ = ["TOLERANCE", "Difference", "Verification", "verify", "verify_sharded"]
