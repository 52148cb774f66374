"""The verdicts of a step and the exit codes that they become (numerics.md, "Verdicts")."""

EQUAL, DIFFERENT, VOID = "EQUAL", "DIFFERENT", "VOID"

EXIT_CODES = {EQUAL: 0, DIFFERENT: 3, VOID: 4}
