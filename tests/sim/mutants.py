from types import SimpleNamespace
MUTANTS: dict = {}
